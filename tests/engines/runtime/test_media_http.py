"""Images over HTTP: every API that may show them, what they cost and save, and hostile ones; the engine lives through all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import numpy as np
import openai
import pytest
from PIL import Image

from engines.api_schema import MAX_IMAGES
from engines.errors import RpcBadRequest, RpcRefused
from engines.rpc_client import RpcClient
from engines.wire import SlotKey
from tests.engine_client import call, post
from tests.engine_process import EngineProcess, free_port
from tests.engines.runtime.test_media_image import bomb, picture, uri, written
from tests.engines.runtime.test_media_projector import image
from tests.synthetic_gguf import SyntheticModel

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.fixture(scope="module")
def seeing_engine(
    tiny_model: Callable[..., SyntheticModel], projectors: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    settings = {"slots": 2, "context_tokens": 2048, "projector_path": str(projectors / "qwen35.gguf")}
    settings |= {"rpc_port": free_port(), "checkpoint_min_tokens": 16, "batch_tokens": 64, "micro_batch_tokens": 64}
    folder = tmp_path_factory.mktemp("seeing")
    with EngineProcess(folder, tiny_model("qwen35", tie_free=True).path, **settings) as engine:
        yield engine


def png(width: int = 128, height: int = 96, seed: int = 0) -> str:
    return uri(written(Image.fromarray(image(width, height, seed)), "PNG"))


def shown(url: Any, text: str = "What is it?") -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def body(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": 8, "temperature": 0, **fields}


def usage(engine: EngineProcess, messages: list[dict[str, Any]]) -> tuple[int, int]:
    """Tokens of the prompt, and those that were reused."""
    answer = post(engine, CHAT, body(messages))
    assert answer.status == 200, answer.value
    found = answer.value["usage"]
    return found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]


def test_the_official_client_shows_an_image(seeing_engine: EngineProcess) -> None:
    with openai.OpenAI(base_url=seeing_engine.base_url + "/v1", api_key="unused", max_retries=0) as client:
        messages: Any = shown(png(seed=1))
        answer = client.chat.completions.create(model="x", messages=messages, max_tokens=8, temperature=0)
        plain = client.chat.completions.create(
            model="x", messages=[{"role": "user", "content": "Look:What is it?"}], max_tokens=8, temperature=0
        )
        streamed = client.chat.completions.create(
            model="x", messages=messages, max_tokens=8, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert answer.usage is not None
    assert plain.usage is not None
    assert answer.choices[0].finish_reason == "length"
    assert text == answer.choices[0].message.content
    # 12 embeddings, and the model's marks around them.
    assert answer.usage.prompt_tokens - plain.usage.prompt_tokens >= 12


def test_an_image_is_reused_until_it_is_another_one(seeing_engine: EngineProcess) -> None:
    first, other = shown(png(seed=2), "Which colours does it have?"), shown(png(seed=3), "Which colours does it have?")
    tokens, cached = usage(seeing_engine, first)
    assert cached == 0
    again_tokens, again_cached = usage(seeing_engine, first)
    assert again_tokens == tokens
    # All but the answer's opening, which the template begins anew.
    assert again_cached > tokens - 16
    assert usage(seeing_engine, other) == (tokens, 0)
    turn = [*first, {"role": "assistant", "content": "Some."}, {"role": "user", "content": "And now?"}]
    turn_tokens, turn_cached = usage(seeing_engine, turn)
    assert turn_tokens > tokens
    assert turn_cached == again_cached


def test_the_official_clients_of_the_other_apis_show_images_too(seeing_engine: EngineProcess) -> None:
    url = png(seed=4)
    expected = post(seeing_engine, CHAT, body(shown(url))).value["choices"][0]["message"]["content"]
    parts: Any = [{"type": "input_text", "text": "Look:"}, {"type": "input_image", "image_url": url}]
    parts.append({"type": "input_text", "text": "What is it?"})
    with openai.OpenAI(base_url=seeing_engine.base_url + "/v1", api_key="unused", max_retries=0) as client:
        response = client.responses.create(
            model="x", input=[{"role": "user", "content": parts}], max_output_tokens=8, temperature=0
        )
    assert response.output_text == expected
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    blocks: Any = [{"type": "text", "text": "Look:"}, {"type": "image", "source": source}]
    messages: Any = [{"role": "user", "content": [*blocks, {"type": "text", "text": "What is it?"}]}]
    with anthropic.Anthropic(base_url=seeing_engine.base_url, api_key="unused", max_retries=0) as claude:
        message = claude.messages.create(model="x", messages=messages, max_tokens=8, extra_body={"temperature": 0})
        counted = claude.messages.count_tokens(model="x", messages=messages)
    assert "".join(block.text for block in message.content if block.type == "text") == expected
    assert response.usage is not None
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert response.usage.input_tokens == counted.input_tokens


def test_tools_may_show_images(seeing_engine: EngineProcess) -> None:
    call_of = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = [{"type": "text", "text": "here"}, {"type": "image_url", "image_url": png()}]
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call_of]},
        {"role": "tool", "tool_call_id": "c", "content": result},
    ]
    assert usage(seeing_engine, messages)[0] > 12
    source = {"type": "base64", "media_type": "image/png", "data": png().partition(",")[2]}
    turn = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": source}]}
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    turns = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": [use]}]
    answer = post(seeing_engine, MESSAGES, {"messages": [*turns, {"role": "user", "content": [turn]}], "max_tokens": 4})
    assert answer.status == 200, answer.value


HOSTILE = {
    "an address": ("http://127.0.0.1/cat.png", "fetches no addresses"),
    "a file": ("file:///etc/passwd", "fetches no addresses"),
    "a page": ("data:text/html;base64,QUJD", "must read data:image"),
    "broken base64": ("data:image/png;base64,@@@", "base64 is broken"),
    "a lone surrogate": ("data:image/png;base64,\ud800", "base64 is broken"),
    "no image": (uri(b"not an image"), "could not be read"),
    "half an image": (uri(written(picture(), "PNG")[:70]), "could not be read"),
    "a picture that is vast": (uri(bomb(100_000, 100_000)), "million are the most"),
    "a picture without pixels": (uri(bomb(40, 24)), "could not be read"),
    "a line": (uri(written(Image.new("RGB", (4020, 20)), "PNG")), "times the other"),
    "more than a context": (png(4000, 3000), "are the most"),
    "no text": (7, "image_url"),
}


def test_hostile_images_are_refused_and_the_engine_lives(seeing_engine: EngineProcess) -> None:
    for name, (url, word) in HOSTILE.items():
        answer = post(seeing_engine, CHAT, body(shown(url)))
        error = answer.value["error"]
        assert (answer.status, error["type"]) == (400, "invalid_request_error"), name
        assert word in error["message"], name
        assert error["param"].startswith("messages.0.content.1"), name
    many = [{"type": "image_url", "image_url": png(32, 32)}] * (MAX_IMAGES + 1)
    answer = post(seeing_engine, CHAT, body([{"role": "user", "content": many}]))
    assert (answer.status, f"{MAX_IMAGES} are the most" in answer.value["error"]["message"]) == (400, True)
    for role in ("system", "assistant"):
        answer = post(seeing_engine, CHAT, body([{**shown(png())[0], "role": role}, {"role": "user", "content": "x"}]))
        assert (answer.status, answer.value["error"]["code"]) == (400, "invalid_request")
    pieces = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}
    answer = post(seeing_engine, MESSAGES, {"messages": [{"role": "user", "content": [pieces]}], "max_tokens": 4})
    assert answer.status == 400
    upload = {"type": "input_image", "file_id": "f"}
    answer = post(seeing_engine, RESPONSES, {"input": [{"role": "user", "content": [upload]}]})
    assert answer.status == 400
    seeing_engine.wait_idle()
    assert usage(seeing_engine, shown(png(seed=9)))[0] > 12


def test_too_many_images_for_the_context_are_refused(seeing_engine: EngineProcess) -> None:
    parts = [{"type": "image_url", "image_url": png(640, 640, seed)} for seed in range(6)]
    answer = post(seeing_engine, CHAT, body([{"role": "user", "content": parts}]))
    assert (answer.status, answer.value["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, body(shown(png()))),
        (CHAT, body(shown("http://127.0.0.1/cat.png"))),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": png()}]}]}),
        (
            MESSAGES,
            {
                "max_tokens": 4,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
                        ],
                    }
                ],
            },
        ),
        ("/apply-template", {"messages": shown(png())}),
    ],
    ids=["chat", "an address", "responses", "messages", "template"],
)
def test_without_a_projector_images_are_refused_in_so_many_words(
    endpoint_engine: EngineProcess, path: str, fields: dict[str, Any]
) -> None:
    answer = post(endpoint_engine, path, fields)
    assert answer.status == 400
    assert "no projector" in answer.value["error"]["message"]
    if path != MESSAGES:
        assert answer.value["error"]["code"] == "unsupported_parameter"
        assert "projector_path" in answer.value["error"]["hint"]


def test_an_engine_tells_whether_it_sees(seeing_engine: EngineProcess, endpoint_engine: EngineProcess) -> None:
    for engine, sees in ((seeing_engine, True), (endpoint_engine, False)):
        assert engine.get("/props")["modalities"] == {"vision": sees, "audio": False}
        (entry,) = engine.get("/v1/models")["data"]
        assert entry["architecture"]["input_modalities"] == (["text", "image"] if sees else ["text"])


def test_a_template_shows_where_an_image_stands(seeing_engine: EngineProcess) -> None:
    answer = post(seeing_engine, "/apply-template", {"messages": shown(png())})
    assert "Look:<__media__>What is it?" in answer.value["prompt"]


def test_the_state_of_a_slot_with_an_image_stays(seeing_engine: EngineProcess) -> None:
    assert usage(seeing_engine, shown(png(seed=11)))[0] > 12
    refused = 0
    for slot in seeing_engine.wait_idle():
        for path in (f"/slots/{slot['id']}/state", f"/slots/{slot['id']}/state/meta"):
            answer = call(seeing_engine, "GET", path)
            if answer.status == 400:
                assert answer.value["error"]["code"] == "state_has_images"
                assert "images included" in answer.value["error"]["hint"]
                refused += 1
    assert refused >= 2


async def test_the_binary_protocol_decodes_chats_with_images_and_moves_none(seeing_engine: EngineProcess) -> None:
    asked = body(shown(png(seed=12)))
    async with RpcClient("127.0.0.1", seeing_engine.config.rpc_port, name="test") as client:
        assert sum([len(chunk.get("token_ids", [])) async for chunk in client.decode(asked)]) == 8
        with pytest.raises(RpcBadRequest) as refused:
            await client.prefill(asked)
        assert refused.value.peer_code == "unsupported_parameter"
        codes = set()
        for slot in seeing_engine.wait_idle():
            try:
                await client.state_meta(SlotKey(slot["id"]))
            except RpcRefused as error:
                codes.add(error.peer_code)
        assert codes == {"state_has_images"}


async def test_cancels_and_text_and_images_at_once(seeing_engine: EngineProcess) -> None:
    """Some leave while their image is computed, some while it is read; the others never notice."""
    rng = np.random.default_rng(3)
    timeout = aiohttp.ClientTimeout(total=60)

    async def one(session: aiohttp.ClientSession, index: int) -> int:
        fields = body(shown(png(400, 300, index % 5)) if index % 2 else [{"role": "user", "content": f"text {index}"}])
        asking = session.post(CHAT, json=fields)
        try:
            patience_s = float(rng.random()) * 0.2 if index % 3 == 0 else 60.0
            async with asyncio.timeout(patience_s), asking as answer:
                await answer.read()
                return answer.status
        except TimeoutError:
            return 0

    async with aiohttp.ClientSession(seeing_engine.base_url, timeout=timeout) as session:
        statuses = await asyncio.gather(*(one(session, index) for index in range(30)))
    assert {status for index, status in enumerate(statuses) if index % 3} == {200}
    assert set(statuses) <= {0, 200}
    seeing_engine.wait_idle()
    tokens, _ = usage(seeing_engine, shown(png(400, 300, 1)))
    assert tokens > 100
