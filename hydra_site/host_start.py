"""What a host does when its heads come up: find what still runs, start what is wanted."""

from pathlib import Path

from django.conf import settings

from engines import services as engines
from engines import store_watch, watch


def start_host() -> int:
    """Look at this host's store and engines after a restart of the whole stack; returns how many engines were told to start."""
    home = Path(settings.HYDRA_HOME)
    # The store before the engines, which are told of it when they start.
    store_watch.look_at_store(settings.HYDRA_HOST_NAME, home / "store", after_restart=True)
    watch.look_at_host(settings.HYDRA_HOST_NAME, home / "engines", after_restart=True)
    return engines.start_wanted(settings.HYDRA_HOST_NAME)
