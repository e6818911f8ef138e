"""`python -m hydra_site.supervisor`: what `manage.py up` does, without Django."""

from hydra_site.supervisor.run import main

raise SystemExit(main())
