"""A request that another replica of the site goes on with has its lease prolonged and given back by that one."""

from importlib import import_module

from django.db import migrations

_FIRST = import_module("sessions.migrations.0003_leases_and_explanations").LEASE
_KEEPS = "DO UPDATE SET engine_id"
LEASE = _FIRST.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION").replace(
    _KEEPS, "DO UPDATE SET owner = excluded.owner, engine_id"
)


class Migration(migrations.Migration):

    dependencies = [
        ("hydra_sessions", "0005_kv_losses"),
    ]

    operations = [
        migrations.RunSQL(LEASE, _FIRST.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")),
    ]
