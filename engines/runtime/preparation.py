"""From validated requests to generations, on a few threads of its own beside the event loop.

Parsing, templating, tokenising and compiling a large request take long, and the other streams' pieces must not wait for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from aiohttp import web

from engines.api_constraint import ConstraintSpec
from engines.api_schema import ChatRequest
from engines.config import EngineConfig
from engines.errors import (
    ContextLengthExceeded,
    EngineLoading,
    EngineStopping,
    InvalidRequest,
    UnsupportedParameter,
)
from engines.runtime.chat import ChatTemplate, Prompt
from engines.runtime.constraint import ConstraintCompiler
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation, Mailbox
from engines.runtime.llama import Llama
from engines.runtime.request_defaults import RequestDefaults
from engines.runtime.sampler import SEED_MASK, SamplingParams

PREPARE_THREADS = 2
MAX_REQUEST_ID_CHARS = 128
T = TypeVar("T")


def request_id(request: web.Request) -> str:
    """The caller's id where it is short and plain, for it goes into answers and logs; else a new one."""
    return plain_request_id(request.headers.get("X-Request-Id", ""))


def plain_request_id(given: str) -> str:
    """`given` if it may be used as an id, else a new one."""
    plain = given.isascii() and all(letter.isalnum() or letter in "-_." for letter in given)
    return given if plain and 0 < len(given) <= MAX_REQUEST_ID_CHARS else uuid.uuid4().hex


class Preparation:
    """What every operation on the loaded model shares. `run` and `running` are for the event loop, the rest for any thread."""

    def __init__(self, config: EngineConfig, core: EngineCore) -> None:
        self.config = config
        self.core = core
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="prepare")
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="aside")
        self._making = threading.Lock()
        self._template: ChatTemplate | None = None
        self._compiler: ConstraintCompiler | None = None
        self.defaults = RequestDefaults()

    def close(self) -> None:
        for pool in (self._pool, self._aside):
            pool.shutdown(wait=False, cancel_futures=True)
        with self._making:
            if self._template is not None:
                self._template.close()

    async def run(self, work: Callable[..., T], *args: object) -> T:
        """`work(*args)` on one of the threads. Raises EngineLoading and EngineStopping while there is no model."""
        self.llama  # noqa: B018 -- asks before a body is parsed for nothing
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    async def run_aside(self, work: Callable[..., T], *args: object) -> T:
        """The same on a thread of its own, for work without a bound by the context: chats must not wait behind it."""
        self.llama  # noqa: B018
        return await asyncio.get_running_loop().run_in_executor(self._aside, work, *args)

    @contextmanager
    def running(self, generations: Sequence[Generation]) -> Iterator[None]:
        """Submits all of them, and cancels what still runs when the block is left, by whatever way."""
        self.core.submit(*generations)
        try:
            yield
        finally:
            for generation in generations:
                self.core.cancel(generation)

    @property
    def llama(self) -> Llama:
        """The loaded model. Raises EngineLoading and EngineStopping while it must not be asked."""
        if self.core.state == "loading":
            raise EngineLoading("The model is being loaded.")
        if self.core.state != "ready" or self.core.llama is None:
            raise EngineStopping("The engine is shutting down.")
        return self.core.llama

    @property
    def template(self) -> ChatTemplate:
        llama = self.llama
        with self._making:
            if self._template is None:
                source = self.config.chat_template or llama.chat_template
                limit = self.config.context_tokens
                self._template = ChatTemplate(source, llama.vocabulary, context_tokens=limit)
            return self._template

    @property
    def compiler(self) -> ConstraintCompiler:
        llama = self.llama
        with self._making:
            if self._compiler is None:
                self._compiler = ConstraintCompiler(llama.vocabulary)
            return self._compiler

    def constrain(self, generations: Sequence[Generation], spec: ConstraintSpec | None) -> None:
        """Gives each generation its own place in the form that its answer must have, if it must have one.

        Raises InvalidRequest with the field and the place for a form that does not compile.
        """
        if spec is not None:
            for generation in generations:
                generation.constraint = self.compiler.compile(spec)

    def chat_prompt(self, request: ChatRequest, param: str = "messages") -> Prompt:
        """The request's messages as the model reads them. `param` names the client's field in errors."""
        llama = self.llama
        self.refuse_hopeless(sum(len(message.text().encode()) for message in request.messages), param)
        try:
            return self.template.prompt(request, with_cuts=llama.needs_checkpoints)
        except UnicodeEncodeError as error:
            raise InvalidRequest("The rendered prompt holds a lone surrogate, which is not valid Unicode.") from error

    def generations(
        self,
        request: ChatRequest,
        prompts: Sequence[Sequence[int]],
        identity: str,
        *,
        cuts: Sequence[int] = (),
        param: str,
    ) -> list[Generation]:
        """`n` generations of each prompt, which differ in their seed and share one mailbox; `choice` is the place in the list.

        Raises InvalidRequest for an empty prompt and ContextLengthExceeded for one that leaves no room for an answer.
        """
        request = self.defaults.fill(request)
        limit = self.config.context_tokens
        for prompt in prompts:
            if not prompt:
                raise InvalidRequest("The prompt has no token.", param=param)
            if len(prompt) >= limit:
                raise ContextLengthExceeded(
                    f"The prompt has {len(prompt)} tokens; the context holds {limit}, the answer included.", param=param
                )
        params = self._sampling(request)
        wanted = request.max_new_tokens or self.config.default_max_tokens or limit
        mailbox = Mailbox()
        now = time.monotonic()
        choices = [list(prompt) for prompt in prompts for _ in range(request.n or 1)]
        return [
            Generation(
                request_id=identity,
                prompt=prompt,
                params=replace(params, seed=(params.seed + index) & SEED_MASK),
                stops=request.stops,
                max_new_tokens=min(wanted, limit - len(prompt)),
                mailbox=mailbox,
                deadline_at=now + self.config.request_deadline_s,
                choice=index,
                reuse_prefix=request.cache_prompt,
                wants_progress=request.return_progress and request.stream and index == 0,
                cuts=list(cuts),
                owner=request.prompt_cache_key or request.user or "",
                priority=request.priority,
                draft_min=request.draft_min,
                draft_max=request.draft_max,
            )
            for index, prompt in enumerate(choices)
        ]

    def _sampling(self, request: ChatRequest) -> SamplingParams:
        vocabulary = self.llama.vocabulary
        params = SamplingParams.of(request, self.config, vocabulary.size, vocabulary.end_tokens)
        if self.config.samples_on_device and not self.config.whole_vocabulary_slots:
            self._refuse_whole_vocabulary(params)
        return params

    def _refuse_whole_vocabulary(self, params: SamplingParams) -> None:
        if params.needs_whole_vocabulary(self.config.device_candidates):
            raise UnsupportedParameter(
                "This engine samples on its device and keeps no sequence for log probabilities, lifting biases or top_k 0.",
                hint="Start it with whole_vocabulary_slots of at least 1.",
            )

    def refuse_hopeless(self, text_bytes: int, param: str) -> None:
        """No token is longer than the longest written one, so much text can be refused before it is tokenised."""
        at_least = text_bytes // max(1, int(self.llama.vocabulary.written_bytes.max()))
        if at_least >= self.config.context_tokens:
            raise ContextLengthExceeded(
                f"{param} has {text_bytes} bytes, at least {at_least} tokens;"
                f" the context holds {self.config.context_tokens}.",
                param=param,
            )
