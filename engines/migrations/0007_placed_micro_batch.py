from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('engines', '0006_checkpoints_by_slots'),
    ]

    operations = [
        migrations.AddField(
            model_name='engine',
            name='placed_micro_batch_tokens',
            field=models.PositiveIntegerField(blank=True, editable=False, help_text='Tokens computed at once on a card, as many as there was room for; empty: as many as suit its card.', null=True),
        ),
    ]
