"""Templates: what the model is shown, where a later prompt will branch off, and what a hostile template cannot do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engines.api_schema import ChatRequest, parse_chat_request
from engines.config import EngineConfig
from engines.errors import InvalidRequest
from engines.runtime.cells import common_prefix
from engines.runtime.chat import ChatTemplate
from engines.runtime.llama import Llama, Vocabulary
from tests.synthetic_gguf import SyntheticModel

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


def test_a_template_that_wants_a_user_message_has_one_cut_less(vocabulary: Vocabulary) -> None:
    needs_user = "{% if messages[-1].role == 'system' %}{{ raise_exception('no user') }}{% endif %}" + DROPS_REASONING
    assert len(ChatTemplate(needs_user, vocabulary).prompt(request(*FIRST), with_cuts=True).cuts) == 1


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
