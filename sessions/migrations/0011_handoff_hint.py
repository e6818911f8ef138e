"""A move that failed says what would help. The database fills it in for a site of the release before this one."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("hydra_sessions", "0010_drains")]

    operations = [
        migrations.AddField(
            model_name="handoff",
            name="hint",
            field=models.CharField(blank=True, db_default="", help_text="What would help.", max_length=200),
        ),
    ]
