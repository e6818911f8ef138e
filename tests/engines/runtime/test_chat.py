"""Templates: what the model is shown, where a later prompt will branch off, and what a hostile template cannot do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.api_schema import ChatRequest, parse_chat_request
from engines.config import EngineConfig
from engines.errors import ContextLengthExceeded, InvalidRequest
from engines.runtime.cells import common_prefix
from engines.runtime.chat import ChatTemplate, tool_format
from engines.runtime.chat_output import ChatFormat, ChatOutput
from engines.runtime.llama import Llama, Vocabulary
from tests.synthetic_gguf import SyntheticModel

ROOT = Path(__file__).resolve().parents[3]

# As Qwen's: the opening of an answer begins a thought, and thoughts of earlier answers are dropped.
DROPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def vocabulary(tiny_model: Callable[..., SyntheticModel]) -> Iterator[Vocabulary]:
    config = EngineConfig(str(tiny_model("llama").path), "tiny", slots=1, context_tokens=64)
    llama = Llama(config, 1, lambda _share: None)
    yield llama.vocabulary
    llama.close()


def request(*messages: tuple[str, str], **fields: Any) -> ChatRequest:
    body = {"messages": [{"role": role, "content": content} for role, content in messages], **fields}
    return parse_chat_request(json.dumps(body).encode())


FIRST = (("system", "You are a parrot of few words."), ("user", "Who are you, and what do you want?"))
SECOND = (*FIRST, ("assistant", "<think>\nHm, a parrot.\n</think>\nA parrot."), ("user", "And then?"))


def test_cuts_stand_where_the_next_prompt_branches_off(vocabulary: Vocabulary) -> None:
    template = ChatTemplate(DROPS_REASONING, vocabulary)
    first = template.prompt(request(*FIRST), with_cuts=True)
    second = template.prompt(request(*SECOND), with_cuts=True)
    other = template.prompt(request(FIRST[0], ("user", "Another question.")), with_cuts=True)
    system_cut, turn_cut = first.cuts
    # The whole prompt up to the answer's opening is shared, and what follows it is not.
    shared = common_prefix(first.tokens, second.tokens)
    opening = len(vocabulary.tokenize("<|im_start|>assistant\n", add_special=False, parse_special=True))
    assert turn_cut <= shared <= turn_cut + opening
    assert system_cut <= common_prefix(first.tokens, other.tokens)
    assert other.cuts[0] == system_cut
    assert second.cuts[0] == system_cut
    assert len(first.tokens) > turn_cut > system_cut


def test_a_template_that_wants_a_user_message_is_cut_behind_the_system_prompt_too(vocabulary: Vocabulary) -> None:
    needs_user = "{% if messages[-1].role == 'system' %}{{ raise_exception('no user') }}{% endif %}" + DROPS_REASONING
    template = ChatTemplate(needs_user, vocabulary)
    first = template.prompt(request(*FIRST), with_cuts=True)
    other = template.prompt(request(FIRST[0], ("user", "Another question.")), with_cuts=True)
    assert first.cuts[0] == other.cuts[0] == common_prefix(first.tokens, other.tokens)
    assert len(first.cuts) == len(other.cuts) == 2


def test_a_template_that_refuses_both_beginnings_has_one_cut_less(vocabulary: Vocabulary) -> None:
    refusing = "{% if messages|length < 3 and not add_generation_prompt %}{{ raise_exception('') }}{% endif %}"
    template = ChatTemplate(refusing + DROPS_REASONING, vocabulary)
    assert len(template.prompt(request(*SECOND), with_cuts=True).cuts) == 1


def test_a_text_of_many_scripts_is_cut_at_the_same_place(vocabulary: Vocabulary) -> None:
    messages = (("system", "Ты — попугай 🦜 日本語"), ("user", "Кто ты? 日本語で"))
    prompt = ChatTemplate(DROPS_REASONING, vocabulary).prompt(request(*messages), with_cuts=True)
    written = b"".join(
        vocabulary.text_of(t).encode("utf-8", "surrogateescape") for t in prompt.tokens[: prompt.cuts[0]]
    )
    assert len(written) > 0
    assert len(prompt.cuts) == 2


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(100000000) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ undefined.attribute }}",
        "{{ raise_exception('not for me') }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_a_hostile_or_broken_template_is_a_refusal(vocabulary: Vocabulary, source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, vocabulary).render(request(*FIRST))
    assert caught.value.http_status == 400


def test_the_template_sees_what_templates_expect(vocabulary: Vocabulary) -> None:
    source = "{{ messages | tojson }}~{{ strftime_now('%Y') | length }}~{{ enable_thinking }}~{{ eos_token }}"
    shown = ChatTemplate(source, vocabulary).render(
        request(("developer", "é <b>"), ("user", "x"), chat_template_kwargs={"enable_thinking": False})
    )
    messages, year, thinking, eos = shown.rsplit("~", 3)
    assert json.loads(messages) == [{"role": "system", "content": "é <b>"}, {"role": "user", "content": "x"}]
    assert "<b>" in messages  # not escaped as HTML
    assert (year, thinking, eos) == ("4", "False", "<|im_end|>")


def test_without_a_template_the_prompt_is_chatml(vocabulary: Vocabulary) -> None:
    assert ChatTemplate(None, vocabulary).render(request(("user", "Hi"))) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


CALLER = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln", "days": 2}'}}
    ],
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {"type": "object", "properties": {"city": {}}},
    },
}


def conversation(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return parse_chat_request(json.dumps({"messages": messages, **fields}).encode())


def test_both_names_of_reasoning_reach_the_template(vocabulary: Vocabulary) -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.reasoning_content }}]{% endfor %}", vocabulary)
    answers = [{"role": "assistant", "content": "x", name: "Hm."} for name in ("reasoning_content", "reasoning")]
    assert template.render(conversation({"role": "user", "content": "x"}, *answers)) == "[][Hm.][Hm.]"


def test_what_a_request_says_of_reasoning_reaches_the_template(vocabulary: Vocabulary) -> None:
    template = ChatTemplate(
        "{{ enable_thinking is defined }} {{ enable_thinking }} {{ reasoning_effort }} {{ extra }}", vocabulary
    )
    user = ("user", "x")
    assert template.render(request(user)) == "False   "
    assert template.render(request(user, enable_thinking=False)) == "True False  "
    assert template.render(request(user, reasoning_effort="high")) == "True True high "
    assert (
        template.render(request(user, thinking_budget_tokens=0, chat_template_kwargs={"extra": [1]}))
        == "True False  [1]"
    )


@pytest.mark.parametrize("opening", ["<think>", "<think>\n"])
def test_the_prompt_tells_whether_it_opens_a_thought_and_can_be_made_to_close_it(
    vocabulary: Vocabulary, opening: str
) -> None:
    template = ChatTemplate("{{ messages[0].content }}|" + opening.replace("\n", "{{ '\n' }}"), vocabulary)
    assert template.render(request(("user", "x"))) == "x|" + opening
    assert template.prompt(request(("user", "x")), with_cuts=False).opens_thought
    closed = request(("user", "x"), enable_thinking=False)
    assert template.render(closed) == "x|<think>\n\n</think>\n\n"
    assert not template.prompt(closed, with_cuts=False).opens_thought


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{{ tools }}<tool_call><function=x><parameter=y>", "qwen_xml"),
        ("{{ tools }}<tool_call>{'name': x, 'arguments': y}", "hermes_json"),
        ("{{ tools }}<tool_call><arg_key>arguments", None),
        ("{{ tools }}[TOOL_CALLS] arguments", None),
        ("{{ messages }}", None),
    ],
)
def test_a_templates_tool_format_shows_in_its_text(source: str, form: str | None) -> None:
    assert tool_format(source) == form


def test_tools_and_calls_reach_a_template_that_knows_them(vocabulary: Vocabulary) -> None:
    source = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{% for call in m.tool_calls or [] %}"
        "<tool_call>{{ call.function.arguments | items | list }}{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    )
    template = ChatTemplate(source, vocabulary)
    messages = [{"role": "user", "content": "?"}, CALLER, {"role": "tool", "tool_call_id": "c1", "content": "Rain."}]
    offered = conversation(*messages, tools=[WEATHER])
    assert template.render(offered) == json.dumps(WEATHER) + "<tool_call>[('city', 'Köln'), ('days', 2)]c1"
    assert template.prompt(offered, with_cuts=False).tool_format == "hermes_json"
    withheld = conversation(*messages, tools=[WEATHER], tool_choice="none")
    assert template.render(withheld) == "<tool_call>[('city', 'Köln'), ('days', 2)]c1"
    assert template.prompt(withheld, with_cuts=False).tool_format is None


def test_a_template_that_knows_no_tools_is_given_them_as_text(vocabulary: Vocabulary) -> None:
    template = ChatTemplate(None, vocabulary)
    results = [{"role": "tool", "tool_call_id": "c1", "content": text} for text in ("Rain.", "Sun.")]
    asked = conversation(
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": "?"}, CALLER, *results, tools=[WEATHER]
    )
    system, user, assistant, answer, opening = template.render(asked).split("<|im_start|>")[1:]
    assert system.startswith("system\nBe kind.\n\n")
    assert json.dumps(WEATHER["function"]) in system
    assert user == "user\n?<|im_end|>\n"
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
    assert assistant == f"assistant\nI look.\n{call}<|im_end|>\n"
    assert answer == (
        "user\n<tool_response>\nRain.\n</tool_response>\n<tool_response>\nSun.\n</tool_response><|im_end|>\n"
    )
    assert opening == "assistant\n"
    assert template.prompt(asked, with_cuts=False).tool_format == "hermes_json"
    without_system = conversation({"role": "user", "content": "?"}, tools=[WEATHER])
    assert template.render(without_system).startswith("<|im_start|>system\n#")


def test_a_prompt_that_no_context_holds_is_refused_before_it_is_tokenised(vocabulary: Vocabulary) -> None:
    template = ChatTemplate(
        "{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}", vocabulary, context_tokens=64
    )
    with pytest.raises(ContextLengthExceeded):
        template.prompt(request(("user", "x")), with_cuts=True)


# --- templates of real models, where llama.cpp's source tree is unpacked ----------------------------


@pytest.fixture
def real_template(vocabulary: Vocabulary) -> Callable[[str], ChatTemplate]:
    def load(name: str) -> ChatTemplate:
        trees = sorted(ROOT.glob("build/peer/source/*/vendor/llama.cpp/models/templates"))
        if not trees:
            pytest.skip("llama.cpp's templates are not there; `make peer` unpacks them")
        return ChatTemplate((trees[-1] / name).read_text(), vocabulary)

    return load


ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Weather?"},
    {**CALLER, "reasoning_content": "I must look."},
    {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
]


def test_qwen_35_shows_calls_in_its_tags_and_begins_in_a_thought(real_template: Callable[[str], ChatTemplate]) -> None:
    template = real_template("Qwen3.5-4B.jinja")
    asked = conversation(*ASKED, tools=[WEATHER])
    text = template.render(asked)
    call = (
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    assert f"<|im_start|>assistant\n<think>\nI must look.\n</think>\n\nI look.\n\n{call}<|im_end|>\n" in text
    assert "<tool_response>\nRain.\n</tool_response>" in text
    assert json.dumps(WEATHER) in text
    assert text.endswith("<|im_start|>assistant\n<think>\n")
    prompt = template.prompt(asked, with_cuts=True)
    assert (prompt.tool_format, prompt.opens_thought, len(prompt.cuts)) == ("qwen_xml", True, 2)
    # What the template shows of a call is read back as that call.
    output = ChatOutput(ChatFormat.of(asked, prompt))
    delta = output.feed(f"I must look.\n</think>\n\nI look.\n\n{call}")
    assert (delta.reasoning, delta.content) == ("I must look.", "I look.")
    assert [(c.name, json.loads(c.arguments)) for c in delta.tool_calls] == [("weather", {"city": "Köln", "days": 2})]
    assert template.render(conversation(*ASKED, enable_thinking=False)).endswith("assistant\n<think>\n\n</think>\n\n")


def test_qwen_3_shows_calls_as_json(real_template: Callable[[str], ChatTemplate]) -> None:
    template = real_template("Qwen-Qwen3-0.6B.jinja")
    asked = conversation(*ASKED, tools=[WEATHER])
    text = template.render(asked)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
    assert f"I look.\n{call}<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")
    prompt = template.prompt(asked, with_cuts=True)
    assert (prompt.tool_format, prompt.opens_thought) == ("hermes_json", False)
    assert template.render(conversation(*ASKED, reasoning_effort="none")).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("Qwen3-Coder.jinja", "qwen_xml"),
        ("Qwen-Qwen2.5-7B-Instruct.jinja", "hermes_json"),
        ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja", "hermes_json"),
        ("GLM-4.6.jinja", None),
        ("meta-llama-Llama-3.1-8B-Instruct.jinja", None),
        ("HuggingFaceTB-SmolLM3-3B.jinja", None),
        ("mistralai-Mistral-Nemo-Instruct-2407.jinja", None),
        ("openai-gpt-oss-120b.jinja", None),
    ],
)
def test_real_templates_render_tools(real_template: Callable[[str], ChatTemplate], name: str, form: str | None) -> None:
    template = real_template(name)
    assert template.tool_format == form
    for messages in (ASKED[:2], ASKED):
        text = template.render(conversation(*messages, tools=[WEATHER]))
        assert "Weather?" in text and "Tells it." in text
        assert ("Köln" in text and "Rain." in text) == (messages is ASKED)
