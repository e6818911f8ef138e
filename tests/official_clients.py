"""OpenAI's and Anthropic's own clients; each is closed when its test is over.

One that is left to the garbage collector warns of its sockets, depending on what the collector ends first.
"""

from __future__ import annotations

from contextlib import ExitStack

import anthropic
import openai

TIMEOUT_S = 60

_open = ExitStack()


def openai_client(root: str) -> openai.OpenAI:
    """A client of the server at `root` (`http://host:port`), as long as the test runs; it never asks twice."""
    made = openai.OpenAI(base_url=f"{root}/v1", api_key="unused", max_retries=0, timeout=TIMEOUT_S)
    return _open.enter_context(made)


def anthropic_client(root: str) -> anthropic.Anthropic:
    """As `openai_client`, for Anthropic's library."""
    made = anthropic.Anthropic(base_url=root, api_key="unused", max_retries=0, timeout=TIMEOUT_S)
    return _open.enter_context(made)


def close_clients() -> None:
    _open.close()
