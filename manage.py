#!/usr/bin/env python
"""Runs a management command of the site."""

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "hydra_site.settings")
    # Imported late, so that a missing installation is told in one line.
    try:
        from hydra_site.supervisor.run import main as supervise

        if sys.argv[1:] == ["up"]:
            # The supervisor needs nothing of Django, and reads the settings itself to tell a bad one in one line.
            sys.exit(supervise())
        from django.core.management import execute_from_command_line
    except ImportError as error:
        sys.exit(f"{error.name} is not installed in this Python: use `make run`, or .venv/bin/python manage.py …")
    from hydra_site.env import SettingError
    from hydra_site.supervisor.errors import SupervisorError

    try:
        execute_from_command_line(sys.argv)
    except SettingError as error:
        sys.exit(str(error))
    except SupervisorError as error:
        sys.exit(error.line())


if __name__ == "__main__":
    main()
