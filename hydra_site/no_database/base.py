"""PostgreSQL's backend, except that it never connects."""

from typing import Any, NoReturn

from django.db.backends.postgresql import base
from django.db.utils import OperationalError


class DatabaseWrapper(base.DatabaseWrapper):
    """Refuses every connection with a sentence that names the ways out."""

    def get_new_connection(self, conn_params: Any) -> NoReturn:
        raise OperationalError(
            "no database is known: start Hydra with `make run` (same HYDRA_HOME), or set DATABASE_URL"
        )
