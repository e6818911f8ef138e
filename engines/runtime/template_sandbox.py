"""The process in which one chat template runs. A script of its own: it imports Jinja and nothing of ours.

A template comes out of a GGUF, that is, from a stranger. Jinja's sandbox keeps it from Python's internals, but neither from
time nor from memory: one multiplication, one `center(10**9)` or a list that holds itself forty times over is enough, and no
check between two operations sees it. So the process has limits of its own, and its parent outlives it:
CPU time per request (SIGPROF ends the process), address space (MemoryError), no files, no children.

Frames both ways: eight bytes of length, little-endian, then JSON. The first request is {"source"}, all others {"variables",
"beginnings", "max_chars"}; each has one answer.
"""

from __future__ import annotations

import codecs
import datetime
import json
import pprint  # noqa: F401 -- a filter imports it, when no file can be opened any more
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import jinja2
import jinja2.constants
import jinja2.debug
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = struct.Struct("<Q")
# What a rendering may take beside its own request, and for each byte of that.
MEMORY_BYTES = 256 << 20
MEMORY_PER_REQUEST_BYTE = 16
MOST_MEMORY_BYTES = 4 << 30
# Of the private use area, so that it has nothing in common with a message that follows.
UNLIKE_ANY = "\ue000"
# Whatever a template raises is its fault or the messages'.
FAULTS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


class TemplateRefused(jinja2.TemplateError):
    """The template itself called raise_exception: this conversation does not fit its rules."""


class TextTooLong(ValueError):
    """The template writes without end."""


class GenerationBlock(Extension):
    """{% generation %}…{% endgeneration %} marks an answer for training; here only what stands inside counts."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> None:
    raise TemplateRefused(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own tojson escapes HTML, which would change what the model reads."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)  # noqa: DTZ005 -- templates mean the host's local date


def compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment.from_string(source)


def rendered(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> str:
    pieces, chars = [], 0
    for piece in template.generate(variables):
        chars += len(piece)
        if chars > max_chars:
            raise TextTooLong
        pieces.append(piece)
    return "".join(pieces)


def shared_bytes(template: jinja2.Template, request: dict[str, Any], count: int, text: str) -> int | None:
    """How many bytes of `text` the rendering of its first `count` messages begins with; None if the template refuses those.

    Some templates want a user's message; such a beginning is rendered with one that no conversation has.
    """
    variables = request["variables"]
    first = variables["messages"][:count]
    for messages in (first, [*first, {"role": "user", "content": UNLIKE_ANY}]):
        alone = {**variables, "messages": messages, "add_generation_prompt": False}
        try:
            return len(shared(rendered(template, alone, request["max_chars"]), text).encode("utf-8", "surrogatepass"))
        except FAULTS:
            continue
    return None


def shared(one: str, other: str) -> str:
    """What both begin with. Compares slices, which runs in C, and halves the range where they differ."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return one[:low]


def answer(template: jinja2.Template, request: dict[str, Any]) -> dict[str, Any]:
    try:
        text = rendered(template, request["variables"], request["max_chars"])
    except TextTooLong:
        return {"too_long": True}
    except TemplateRefused as error:
        return {"refused": str(error)[:2000]}
    except FAULTS as error:
        return {"failed": f"{type(error).__name__}: {error}"[:2000]}
    found = [shared_bytes(template, request, count, text) for count in request["beginnings"]]
    return {"text": text, "shared_bytes": [count for count in found if count is not None]}


def compile_answer(source: str) -> tuple[jinja2.Template | None, dict[str, Any]]:
    try:
        return compiled(source), {}
    except jinja2.TemplateSyntaxError as error:
        return None, {"failed": f"line {error.lineno}: {error.message}"[:2000]}
    except (*FAULTS, SyntaxError) as error:
        return None, {"failed": f"{type(error).__name__}: {error}"[:2000]}


def read_frame(stream: BinaryIO, own_bytes: int) -> bytes | None:
    """The next request, None at the end. From here on only so much memory may be taken beside `own_bytes`."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size = LENGTH.unpack(head)[0]
    wanted = own_bytes + min(MEMORY_BYTES + MEMORY_PER_REQUEST_BYTE * size, MOST_MEMORY_BYTES)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    return stream.read(size)


def address_space_bytes() -> int:
    """What this process maps; 0 where the kernel does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def write_frame(stream: BinaryIO, value: dict[str, Any]) -> None:
    raw = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    stream.write(LENGTH.pack(len(raw)) + raw)
    stream.flush()


def load_all() -> None:
    """What Python and Jinja load when they first need it, while files can still be opened."""
    codecs.lookup("unicode_escape")
    time.localtime()
    for source in ("{% if", "{{ 'a\\n' | tojson }}{{ 1 / 0 }}", "{{ raise_exception('') }}"):
        template, _ = compile_answer(source)
        if template:
            answer(template, {"variables": {}, "beginnings": [], "max_chars": 1})


def main(cpu_s: float) -> int:
    """Serves until the parent closes the pipe. `cpu_s` bounds each request."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the engine, which ends its requests first
    load_all()
    own_bytes = address_space_bytes()
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    template: jinja2.Template | None = None
    while (raw := read_frame(requests, own_bytes)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            request = json.loads(raw.decode("utf-8", "surrogatepass"))
            if template is None:
                template, reply = compile_answer(request["source"])
            else:
                reply = answer(template, request)
            write_frame(answers, reply)
        except MemoryError:
            return 3
        signal.setitimer(signal.ITIMER_PROF, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
