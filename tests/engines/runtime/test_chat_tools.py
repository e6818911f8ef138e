"""Tool calls from a real model through the official client: the constraint makes the call, the parser reads it back."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.engine_process import EngineProcess

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
QUESTION = {"role": "user", "content": "What will the weather in Paris be for 3 days?"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "now"}), ({"type": "function", "function": {"name": "weather"}}, {"weather"})],
)
def test_a_forced_call_reads_alike_streamed_and_whole(
    smollm2_engine: EngineProcess, choice: Any, names: set[str]
) -> None:
    wanted: dict[str, Any] = {
        "model": "test-model",
        "messages": [QUESTION],
        "tools": [WEATHER, NOW],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 200,
    }
    with openai.OpenAI(base_url=smollm2_engine.base_url + "/v1", api_key="unused", max_retries=0) as client:
        whole = client.chat.completions.create(**wanted)
        with client.chat.completions.stream(**wanted) as stream:
            for _ in stream:
                """The client's accumulator works while it is iterated over."""
            streamed = stream.get_final_completion()
    made = []
    for completion in (whole, streamed):
        assert completion.choices[0].finish_reason == "tool_calls"
        (call,) = completion.choices[0].message.tool_calls
        made.append((call.function.name, json.loads(call.function.arguments)))
    assert made[0] == made[1]
    assert made[0][0] in names


def test_results_of_calls_lead_to_an_answer(smollm2_engine: EngineProcess) -> None:
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
    }
    result = {"role": "tool", "tool_call_id": "c1", "content": "Noon."}
    with openai.OpenAI(base_url=smollm2_engine.base_url + "/v1", api_key="unused", max_retries=0) as client:
        messages: Any = [QUESTION, called, result]
        completion = client.chat.completions.create(
            model="test-model", messages=messages, tools=[NOW], tool_choice="none", temperature=0, max_tokens=8
        )
    message = completion.choices[0].message
    assert message.content
    assert message.tool_calls is None
