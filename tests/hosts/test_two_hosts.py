"""Two machines that share nothing but an outside PostgreSQL and Valkey: one is the site, the other joins with one command."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import PulledModel
from tests.hosts import network
from tests.hosts.hydra_process import HydraProcess, ask
from tests.hosts.network import Network
from tests.hosts.outside_servers import OutsideServers
from tests.hosts.pool import CHAT, Pool, make_engine, running_pool, served_files, tell
from tests.synthetic_gguf import SyntheticModel

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, pulled_smollm2: PulledModel) -> Iterator[Pool]:
    if reason := network.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("two-hosts")
    with (
        Network("hub", "site", "second") as (hub, site, second),
        OutsideServers(folder, hub.address, "10.213.77.0/24", hub.command()) as servers,
    ):
        environ = {
            "HYDRA_BIND": site.address,
            "HYDRA_ENGINE_HOST": site.address,
            "DATABASE_URL": servers.database_url,
            "BROKER_URL": servers.broker_url,
        }
        with running_pool((hub, site, second), servers, folder, pulled_smollm2, environ) as pool:
            yield pool


STATE = "SELECT state FROM pools_host WHERE name = 'second'"
ENGINE = "SELECT state FROM engines_engine WHERE name = 'second-0'"
EPOCH = "SELECT agent_epoch FROM pools_host WHERE name = 'second'"
TINY = {**CHAT, "model": "tiny"}


def test_a_second_machine_joins_serves_is_lost_and_returns(
    pool: Pool, tiny_model: Callable[..., SyntheticModel]
) -> None:
    token, model = pool.token(), tiny_model("llama")
    head = pool.head(token)
    try:
        with served_files(pool.hub, model.path.parent):
            it_joins(pool, head, token)
            it_serves_a_model_that_the_site_never_had(pool, model)
            # A broker that forgot its users gives them back.
            pool.servers.restart_broker()
            it_is_lost_and_returns(pool, head)
            it_drains_and_retires(pool)
    except AssertionError as error:
        raise AssertionError(f"{error}{head.logs()}{pool.site.logs()}") from error
    finally:
        head.close()


def it_joins(pool: Pool, head: HydraProcess, token: str) -> None:
    print(f"joined and served after {head.start():.1f} s")
    pool.until(STATE, "up")
    assert pool.value("SELECT address FROM pools_host WHERE name = 'second'") == pool.second.address
    assert (
        pool.value("SELECT count(*) FROM pools_gpu g JOIN pools_host h ON h.id = host_id WHERE h.name = 'second'")
        == "1"
    )
    # The same token lets nobody else in.
    with pytest.raises(AssertionError, match="token cannot be used"):
        pool.head(token, "thief").start()


def it_serves_a_model_that_the_site_never_had(pool: Pool, model: SyntheticModel) -> None:
    pool.pull(model.path, "tiny", "second")
    make_engine(pool, "second-0", "tiny")
    print(f"its engine serves after {pool.until(ENGINE, 'ready'):.1f} s")
    status, answer = pool.ask("/v1/chat/completions", TINY)
    assert (status, answer["model"]) == (200, "tiny"), answer
    # Beyond loopback an engine answers nobody but its own site and head.
    port = pool.value("SELECT http_port FROM engines_engine WHERE name = 'second-0'")
    engine_url = f"http://{pool.second.address}:{port}"
    assert ask(pool.hub, f"{engine_url}/health")[0] == 200
    assert ask(pool.hub, f"{engine_url}/v1/chat/completions", TINY)[0] == 401


def it_is_lost_and_returns(pool: Pool, head: HydraProcess) -> None:
    before = pool.value(EPOCH)
    time.sleep(20)
    head.kill_everything()
    print(f"seen lost {pool.until(STATE, 'lost'):.1f} s after kill -9")
    pool.until(ENGINE, "unhealthy")
    assert pool.ask("/v1/chat/completions", TINY)[0] == 503
    assert pool.ask("/v1/chat/completions", CHAT)[0] == 200, "the first host's engine goes on"
    # The very same command brings it back, though its token is used up.
    print(f"back after {head.start():.1f} s")
    pool.until(STATE, "up")
    print(f"its engine serves again after {pool.until(ENGINE, 'ready'):.1f} s")
    assert pool.value(EPOCH) == str(int(before) + 1)
    assert pool.ask("/v1/chat/completions", TINY)[0] == 200


def it_drains_and_retires(pool: Pool) -> None:
    # Draining: nothing new, then its engine ends; and it takes up its work again.
    tell(pool, "DRAINING")
    print(f"drained after {pool.until(ENGINE, 'stopped'):.1f} s")
    assert pool.ask("/v1/chat/completions", TINY)[0] == 503
    tell(pool, "ACTIVE")
    pool.until(ENGINE, "ready")
    # Retiring: it leaves, and its role and user with it.
    tell(pool, "RETIRING")
    print(f"left after {pool.until('SELECT duty FROM pools_host WHERE name = ' + repr('second'), 'retired'):.1f} s")
    assert pool.value("SELECT count(*) FROM pg_roles WHERE rolname LIKE 'hydra_host_second%'") == "0"


LAST_TURN = (
    "SELECT e.name, t.prompt_tokens, t.cached_tokens, t.explanation -> 'chosen' ->> 'restore_from' FROM hydra_sessions_turn t"
    " JOIN engines_engine e ON e.id = t.engine_id WHERE t.prompt_tokens > 0 ORDER BY t.id DESC LIMIT 1"
)
STORY = "You are told a long story about a river, a mill and the stones that nobody counts. " * 6


class Talk:
    """A client's side of one conversation through the site."""

    def __init__(self, pool: Pool, model: str) -> None:
        self._pool, self._model = pool, model
        self._messages = [{"role": "system", "content": STORY}]

    def say(self, text: str) -> str:
        self._messages.append({"role": "user", "content": text})
        answer = self._answer()
        self._messages.append({"role": "assistant", "content": answer})
        return answer

    def last_answer_computed(self) -> str:
        """The last answer again, of an engine that computes all of it."""
        return self._answer(self._messages[:-1], cache_prompt=False)

    def _answer(self, messages: list[dict[str, str]] | None = None, **fields: Any) -> str:
        body = {"model": self._model, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **fields}
        status, answer = self._pool.ask("/v1/chat/completions", {**body, "messages": messages or self._messages})
        assert status == 200, answer
        return str(answer["choices"][0]["message"]["content"])

    def last_turn(self, engine: str) -> tuple[int, int, str]:
        """Tokens of the prompt, tokens that were not computed, and from whose store they were to come; once it was written."""
        deadline = time.monotonic() + 30
        while (row := self._pool.rows(LAST_TURN)[0])[0] != engine:
            assert time.monotonic() < deadline, row
            time.sleep(0.2)
        return int(row[1]), int(row[2]), row[3]


def test_a_conversation_goes_on_at_another_host_from_the_store_of_one_that_drains(
    pool: Pool, tiny_model: Callable[..., SyntheticModel]
) -> None:
    model = tiny_model("llama", layers=4, seed=11)
    head = pool.head(pool.token(), "third", "third")
    try:
        head.start()
        with served_files(pool.hub, model.path.parent):
            pool.pull(model.path, "story", "third")
            make_engine(pool, "third-0", "story", "third", 2048)
            pool.until("SELECT state FROM engines_engine WHERE name = 'third-0'", "ready")
            talk = Talk(pool, "story")
            for number in range(3):
                talk.say(f"Question {number} about the river.")
            prompt_tokens, _, _ = talk.last_turn("third-0")
            # Now the site's own host has one too, which knows nothing of it.
            pool.pull(model.path, "story", "first")
            make_engine(pool, "first-story", "story", "first", 2048)
            pool.until("SELECT state FROM engines_engine WHERE name = 'first-story'", "ready")
        tell(pool, "DRAINING", "third")
        pool.until("SELECT state FROM engines_engine WHERE name = 'third-0'", "stopped")
        answer = talk.say("And what came then?")
        _, cached_tokens, restored_from = talk.last_turn("first-story")
        print(f"{cached_tokens} of {prompt_tokens} tokens came from the store of {restored_from or 'nobody'}")
        assert cached_tokens >= 0.9 * prompt_tokens
        assert restored_from == "third"
        assert talk.last_answer_computed() == answer
    except AssertionError as error:
        raise AssertionError(f"{error}{head.logs()}{pool.site.logs()}") from error
    finally:
        head.close()
