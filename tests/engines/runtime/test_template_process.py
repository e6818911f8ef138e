"""No template holds a thread of the engine or takes its memory, whatever it does."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from engines.errors import ContextLengthExceeded, InvalidRequest, TemplateBroken
from engines.runtime.template_process import MAX_PROCESSES, SANDBOX, TemplateProcess

MESSAGES = [{"role": "user", "content": "Hi"}]
CPU_S = 0.2


@contextmanager
def template(source: str, **bounds: Any) -> Iterator[TemplateProcess]:
    process = TemplateProcess(source, **{"cpu_s": CPU_S, **bounds})
    try:
        yield process
    finally:
        process.close()


def sandboxes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if str(SANDBOX) in child.cmdline()]


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ messages|tojson }}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{{ 'x' * 10**10 }}",
        "{{ [1] * 10**10 }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ 'x'.center(10**10) }}",
        "{{ 'x'|center(10**10) }}",
        "{{ 'x\nx'|indent(10**10) }}",
        "{{ ('x' * million)|list|join('y' * million) }}",
        "{{ ('x' * million).replace('x', 'y' * million) }}",
        "{{ 10 ** (million * million) }}",
        "{{ messages|tojson(indent=10**9) }}",
        "{{ lipsum(n=10**9) }}",
        "{% set ns = namespace(s='x') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        # Lists that hold themselves twice, sixty times over: cheap to make, endless to print or compare.
        "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[1], y=[1]) %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
        "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    ],
)
def test_a_template_without_bounds_is_a_refusal_and_the_next_one_renders(source: str) -> None:
    guarded = "{% if messages %}" + source + "{% endif %}after"
    with template(guarded) as process:
        with pytest.raises(InvalidRequest):
            process.render({"messages": MESSAGES, "million": 10**6})
        assert process.render({"messages": []}).text == "after"


@pytest.mark.parametrize(
    "source", ["{{ ('x' * 10**6)|list|join('y' * 10**5) }}", "{{ 10 ** (10 ** 10) }}", "{{ (" * 5000]
)
def test_a_template_that_takes_no_end_to_compile_is_broken(source: str) -> None:
    # Jinja computes constants when it compiles.
    with pytest.raises(TemplateBroken):
        TemplateProcess(source, cpu_s=CPU_S).close()


def test_a_text_longer_than_any_context_is_refused_before_it_is_whole() -> None:
    source = "{% for a in range(99999) %}{% for b in range(99999) %}xxxx{% endfor %}{% endfor %}"
    with template(source, max_chars=1000) as process, pytest.raises(ContextLengthExceeded):
        process.render({"messages": MESSAGES})


def test_deep_recursion_is_a_refusal() -> None:
    source = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"
    with template(source) as process, pytest.raises(InvalidRequest, match="RecursionError"):
        process.render({"messages": MESSAGES})


@pytest.mark.parametrize("source", ["{% if", "{{ messages | nofilter }}", "{% include 'x' %}{% endif %}", "{{ 1 +"])
def test_a_template_that_cannot_be_compiled_says_the_line(source: str) -> None:
    with pytest.raises(TemplateBroken, match=r"line 2: "):
        TemplateProcess("\n" + source)


@pytest.mark.parametrize("source", ["{% include '/etc/passwd' %}", "{{ cycler.__init__.__globals__.os.environ }}"])
def test_nothing_of_the_host_can_be_reached(source: str) -> None:
    with template(source) as process, pytest.raises(InvalidRequest):
        process.render({"messages": MESSAGES})


def test_a_template_that_refuses_says_why() -> None:
    source = "{{ raise_exception('after user comes assistant') }}"
    with template(source) as process, pytest.raises(InvalidRequest, match="refuses these messages: after user comes"):
        process.render({"messages": MESSAGES})


def test_what_templates_of_hugging_face_use_is_there() -> None:
    source = (
        "{%- generation -%}{{ {'b': 'é<', 'a': [1]} | tojson(indent=1, separators=(',', ':'), sort_keys=true) }}"
        "{%- endgeneration %}"
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
        "{{ strftime_now('%Y')|length }}{{ namespace(a=1).a }}{{ {'k': 'v'}|items|list }}"
    )
    with template(source) as process:
        assert process.render({"messages": MESSAGES * 2}).text == (
            '{\n "a":[\n  1\n ],\n "b":"é<"\n}Hi41[(\'k\', \'v\')]'
        )


def test_beginnings_are_compared_in_bytes_and_refused_ones_left_out() -> None:
    source = (
        "{% if messages|length < 3 and not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}<é>{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    )
    with template(source) as process:
        messages = [{"content": text} for text in ("a", "b🦜", "c")]
        rendering = process.render({"messages": messages, "add_generation_prompt": True}, [1, 2, 3])
    assert rendering.text == "<é>a<é>b🦜<é>c!"
    assert rendering.shared_bytes == (len("<é>a<é>b🦜<é>".encode()), len("<é>a<é>b🦜<é>c".encode()))


def test_renderings_run_beside_one_another_in_a_bounded_number_of_processes() -> None:
    before = len(sandboxes())
    with template("{{ messages[0].content }}") as process:
        texts: list[str] = []
        threads = [
            threading.Thread(
                target=lambda name=name: texts.append(process.render({"messages": [{"content": name}]}).text)
            )
            for name in "abcdefgh"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(texts) == list("abcdefgh")
        assert len(sandboxes()) - before <= MAX_PROCESSES


def test_a_killed_process_costs_one_request_at_most() -> None:
    before = sandboxes()
    with template("{{ messages[0].content }}") as process:
        for sandbox in sandboxes():
            if sandbox not in before:
                sandbox.kill()
        with pytest.raises(InvalidRequest):
            process.render({"messages": MESSAGES})
        assert process.render({"messages": MESSAGES}).text == "Hi"


def test_no_process_stays_behind() -> None:
    before = sandboxes()
    TemplateProcess("forgotten")
    gc.collect()
    with template("closed"):
        assert len(sandboxes()) == len(before) + 1
    assert sandboxes() == before


def test_the_sandbox_imports_nothing_of_ours() -> None:
    imports = [line.split()[1] for line in SANDBOX.read_text().splitlines() if line.startswith(("import ", "from "))]
    assert imports and not any(name.startswith("engines") for name in imports)
