"""Hints to open pages: sent after the commit, and never in the way of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from channels.layers import channel_layers, get_channel_layer
from django.db import transaction

from pools import events, services
from pools.db import in_db
from pools.events import GROUP, publish_on_commit

pytestmark = pytest.mark.django_db(transaction=True)


async def test_a_write_reaches_the_group_once_it_is_committed() -> None:
    layer = get_channel_layer()
    assert layer is not None
    channel = await layer.new_channel()
    await layer.group_add(GROUP, channel)

    def write() -> int:
        with transaction.atomic():
            return services.join_host("here")

    host_id = await in_db(write)
    async with asyncio.timeout(60):
        message = await layer.receive(channel)
    await layer.group_discard(GROUP, channel)
    await layer.flush()
    await layer.close_pools()
    assert message["type"] == "pool.event"
    assert (message["event"]["type"], message["event"]["id"]) == ("host", host_id)
    assert message["event"]["version"] > 0


@pytest.mark.django_db
def test_nothing_leaves_before_the_commit(django_capture_on_commit_callbacks: Any) -> None:
    with django_capture_on_commit_callbacks() as callbacks, transaction.atomic():
        publish_on_commit("host", 1)
    assert len(callbacks) == 1


def test_a_lost_channel_layer_does_not_break_the_write(
    settings: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.CHANNEL_LAYERS = {
        "default": {
            "BACKEND": "channels_redis.core.RedisChannelLayer",
            "CONFIG": {"hosts": ["redis://127.0.0.1:1/0"]},
        }
    }
    channel_layers.backends.clear()
    monkeypatch.setattr(events, "_outage", events.Outage("events are lost"))
    try:
        for name in ("one", "two"):
            services.join_host(name)
    finally:
        channel_layers.backends.clear()
    assert services.host_names() == ["one", "two"]
    assert caplog.text.count("events are lost") == 1


def test_a_layer_that_does_not_answer_is_left_alone_for_a_moment() -> None:
    """A thousand rows that are written at once must not wait for it a thousand times."""
    outage, short = events.Outage("away", pause_s=60.0), events.Outage("away", pause_s=0.0)
    assert not outage.lasts
    outage.tell(OSError("gone"))
    short.tell(OSError("gone"))
    assert outage.lasts and not short.lasts


def test_an_event_of_an_unknown_type_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no event type"):
        publish_on_commit("gpu", 1)
