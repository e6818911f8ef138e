"""The oldest turns are found without reading all: they expire."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("hydra_sessions", "0006_lease_follows_its_stream")]

    operations = [
        migrations.AddIndex(model_name="turn", index=models.Index(fields=["started_at"], name="turn_by_start")),
    ]
