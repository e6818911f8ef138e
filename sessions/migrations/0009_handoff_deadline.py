"""A move has a deadline of its own (one that waits for a prompt to be computed takes longer than another), says why it was made,
and is found by its end: old ones expire. The database fills in both for a site of the release before this one."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("hydra_sessions", "0008_lease_tells_the_wish")]

    operations = [
        migrations.AddField(
            model_name="handoff", name="deadline_s", field=models.FloatField(default=60.0, db_default=60.0)
        ),
        migrations.AddField(
            model_name="handoff",
            name="cause",
            field=models.CharField(
                choices=[
                    ("asked", "asked for"),
                    ("drain", "its engine gets empty"),
                    ("split", "one computes, another writes"),
                ],
                db_default="asked",
                default="asked",
                max_length=8,
            ),
        ),
        migrations.AddIndex(model_name="handoff", index=models.Index(fields=["ended_at"], name="handoff_by_end")),
    ]
