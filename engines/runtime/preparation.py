"""From validated requests to generations, on a few threads of its own beside the event loop.

Parsing, templating, tokenising and compiling a large request take long, and the other streams' pieces must not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from engines.api_constraint import ConstraintSpec
from engines.api_schema import ChatRequest
from engines.arrival_order import ArrivalOrder
from engines.config import EngineConfig
from engines.errors import (
    ContextLengthExceeded,
    EngineError,
    EngineLoading,
    EngineStopping,
    InvalidRequest,
    QueueFull,
    TooManyAnswers,
    UnsupportedParameter,
)
from engines.runtime.chat import ChatTemplate, Prompt
from engines.runtime.constraint import ConstraintCompiler
from engines.runtime.core import EngineCore
from engines.runtime.fingerprint import tokenizer_digest
from engines.runtime.generation import Generation, Mailbox
from engines.runtime.llama import Llama
from engines.runtime.media_desk import MediaDesk
from engines.runtime.media_image import ImageFile, image_file
from engines.runtime.media_projector import Part
from engines.runtime.media_span import NO_SPANS, SpanMap
from engines.runtime.origin import UNKNOWN, RequestOrigin
from engines.runtime.raw_cuts import raw_cuts
from engines.runtime.request_defaults import RequestDefaults
from engines.runtime.sampler import SEED_MASK, SamplingParams
from engines.runtime.sampler_chain import prepare
from engines.runtime.text import NOTHING_SAID

if TYPE_CHECKING:
    from engines.runtime.parking import Parking

PREPARE_THREADS = 2
# So many requests may always wait for those threads; more where the waiting line behind them is longer.
LEAST_PENDING = 64
STOP_S = 5.0
T = TypeVar("T")
Asked = TypeVar("Asked")
# What stands in a prompt for each image of a conversation, in order.
Images = Sequence[Sequence[Part]]

log = logging.getLogger("hydra.engine.preparation")


@dataclass(frozen=True)
class AwaitingImages(Generic[Asked]):
    """A request whose images must be computed before it can go on; `params` are their fields."""

    asked: Asked
    chat: ChatRequest
    files: list[ImageFile]
    params: list[str]


class Preparation:
    """What every operation on the loaded model shares. `run` and `running` are for the event loop, the rest for any thread."""

    def __init__(self, config: EngineConfig, core: EngineCore) -> None:
        self.config = config
        self.core = core
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="prepare")
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="aside")
        self._pending = 0
        self._is_stopping = False
        # A request is prepared, looks for its beginning and is queued; these keep the order over the first two.
        self._preparing, self._looking = ArrivalOrder(), ArrivalOrder()
        self._making = threading.Lock()
        self._template: ChatTemplate | None = None
        self._compiler: ConstraintCompiler | None = None
        self._tokenizer = ""
        self._media: MediaDesk | None = None
        self.defaults = RequestDefaults()
        # Set where there is a store.
        self.parking: Parking | None = None

    async def stop(self) -> None:
        """Ends the threads, which read the model that is about to be freed: what they have begun is done first, in STOP_S at
        most. Whoever comes meanwhile is refused (EngineStopping)."""
        self._is_stopping = True
        pools = (self._pool, self._aside)
        ending = [asyncio.create_task(asyncio.to_thread(pool.shutdown, cancel_futures=True)) for pool in pools]
        await asyncio.wait(ending, timeout=STOP_S)

    def close(self) -> None:
        for pool in (self._pool, self._aside):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._media is not None:
            self._media.close()
        with self._making:
            if self._template is not None:
                self._template.close()

    async def warm_up(self) -> None:
        """Makes what the first request would else wait for: the template's process, which takes 70 ms, and a digest of the
        vocabulary."""
        try:
            await self.run_aside(lambda: (self.template, self.tokenizer))
        except EngineError as error:
            # The template's fault, or the engine is on its way out: whoever asks is told.
            log.info("chats cannot be prepared ahead: %s", error)

    async def run(self, work: Callable[..., T], *args: object) -> T:
        """`work(*args)` on one of the threads. Raises EngineLoading and EngineStopping while there is no model."""
        return await self._on(self._pool, work, *args)

    async def run_in_turn(self, work: Callable[..., T], *args: object) -> T:
        """The same for what is queued next: returns behind those that were begun before, unless one of them takes long."""
        began_s = time.monotonic()
        with self._preparing.place() as place:
            done = await self.run(work, *args)
            await place.turn()
        self.core.metrics.wait_seconds.labels("preparation").observe(time.monotonic() - began_s)
        return done

    async def run_aside(self, work: Callable[..., T], *args: object) -> T:
        """The same on a thread of its own, for work without a bound by the context: chats must not wait behind it."""
        return await self._on(self._aside, work, *args)

    async def _on(self, pool: ThreadPoolExecutor, work: Callable[..., T], *args: object) -> T:
        """Raises QueueFull rather than to let bodies pile up in front of busy threads."""
        if self._is_stopping:
            raise EngineStopping("The engine is shutting down.")
        self.llama  # noqa: B018 -- asks before a body is parsed for nothing
        if self._pending >= max(LEAST_PENDING, self.config.queue_limit + self.config.slots):
            raise QueueFull(f"{self._pending} requests are being prepared already.")
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work, *args)
        finally:
            self._pending -= 1

    async def run_chat(
        self,
        read: Callable[[], Asked],
        chat_of: Callable[[Asked], ChatRequest],
        finish: Callable[[Asked, ChatRequest, Images], T],
        param: str,
        *,
        translated: bool = False,
    ) -> T:
        """`finish` with what was read, its chat and the chat's images, which are computed between the two.

        Without images all of it is one piece of work on one of the threads. Errors name the image's place under `param`, or
        `param` alone where the chat is `translated` from another shape. Raises what `run` and the two do, InvalidRequest for
        images that cannot be taken, and QueueFull.
        """

        def begin() -> T | AwaitingImages[Asked]:
            asked = read()
            chat = chat_of(asked)
            shown = chat.images()
            if not shown:
                return finish(asked, chat, ())
            self.require_sight(param)
            params = [param if translated else f"{param}.{at.message}.content.{at.part}" for at in shown]
            files = [image_file(at.url, place) for at, place in zip(shown, params, strict=True)]
            return AwaitingImages(asked, chat, files, params)

        begun = await self.run_in_turn(begin)
        if not isinstance(begun, AwaitingImages):
            return begun
        images = await self.media.parts(begun.files, begun.params)
        return await self.run(finish, begun.asked, begun.chat, images)

    def require_sight(self, param: str) -> None:
        """Raises UnsupportedParameter where the model sees no images."""
        if not self.config.sees_images:
            raise UnsupportedParameter(
                "This engine's model sees no images; it has no projector.",
                param=param,
                hint="Start the engine with projector_path, or send text only.",
            )

    @property
    def media(self) -> MediaDesk:
        """For the event loop, and only where the engine sees images. Raises EngineLoading and EngineStopping."""
        self.llama  # noqa: B018
        if self._media is None:
            assert self.core.projector is not None
            self._media = MediaDesk(self.config, self.core.projector)
        return self._media

    @asynccontextmanager
    async def running(self, generations: list[Generation], origin: RequestOrigin = UNKNOWN) -> AsyncIterator[None]:
        """Submits all of them, as `origin`'s, and cancels what still runs when the block is left, by whatever way.

        Before that the host's store is asked for the prompt's beginning, for a bounded time. Where one moved here from another
        engine for this very request, it takes the place of the one in `generations`. Where an engine was lost over the request,
        its generations are brought to where it came, and those that had ended are not run.
        """
        if origin.adopted is not None:
            async with origin.adopted.reading(generations) as moved:
                generations[:] = moved
                if origin.budget_s is not None:
                    until = time.monotonic() + origin.budget_s
                    for one in moved:
                        one.deadline_at = min(one.deadline_at, until)
                yield
            return
        if origin.resumption is not None:
            bring, limit = origin.resumption.bring, self.config.context_tokens
            await self.run(bring, generations, self.llama.vocabulary, limit)
        for generation in generations:
            generation.tenant, generation.session = origin.tenant, origin.session
            generation.owner = generation.owner or origin.session
            generation.followed = origin.follows and not generation.spans
            if generation.followed:
                generation.siblings = tuple(generations)
                if generation.keeps_pieces and generation.text.said is None:
                    generation.text.said = [NOTHING_SAID]
            if origin.budget_s is not None:
                generation.deadline_at = min(generation.deadline_at, time.monotonic() + origin.budget_s)
        spans = generations[0].spans  # all choices show the same
        with self.media.holding(spans) if spans else nullcontext():
            waiting = generations if origin.resumption is None else origin.resumption.unfinished(generations)
            if waiting:
                self._refuse_crowd(len(waiting))
                with self._looking.place() as place:
                    if self.parking is not None:
                        await self.parking.look_up(waiting, origin.stores)
                    await place.turn()
                    self.core.submit(*waiting)
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

    @property
    def tokenizer(self) -> str:
        """A digest of the vocabulary; its making takes a while."""
        llama = self.llama
        with self._making:
            if not self._tokenizer:
                self._tokenizer = tokenizer_digest(llama.vocabulary)
            return self._tokenizer

    def constrain(self, generations: Sequence[Generation], spec: ConstraintSpec | None) -> None:
        """Gives each generation its own place in the form that its answer must have, if it must have one.

        Raises InvalidRequest with the field and the place for a form that does not compile.
        """
        if spec is not None:
            for generation in generations:
                generation.constraint = self.compiler.compile(spec)

    def chat_prompt(self, request: ChatRequest, param: str = "messages", images: Images = ()) -> Prompt:
        """The request's messages as the model reads them. `param` names the client's field in errors.

        Raises UnsupportedParameter for a request with images that comes without what was computed of them.
        """
        llama = self.llama
        if not images and request.images():
            self.require_sight(param)
            raise UnsupportedParameter("Images are not taken here.", param=param, hint="Send them in a chat over HTTP.")
        self.refuse_hopeless(sum(len(message.text().encode()) for message in request.messages), param)
        try:
            with_cuts = llama.needs_checkpoints or bool(self.config.store_port)
            return self.template.prompt(request, with_cuts=with_cuts, images=images)
        except UnicodeEncodeError as error:
            raise InvalidRequest("The rendered prompt holds a lone surrogate, which is not valid Unicode.") from error

    def generations(
        self,
        request: ChatRequest,
        prompts: Sequence[Sequence[int]],
        identity: str,
        *,
        cuts: Sequence[int] = (),
        system_cut: int = 0,
        spans: SpanMap = NO_SPANS,
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
        wanted = request.max_new_tokens or (0 if request.fills_context else self.config.default_max_tokens) or limit
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
                cuts=self._cuts(prompt, cuts, spans),
                system_cut=system_cut,
                spans=spans,
                owner=request.prompt_cache_key or request.user or "",
                priority=request.priority,
                draft_min=request.draft_min,
                draft_max=request.draft_max,
                tokenizer=self.tokenizer,
            )
            for index, prompt in enumerate(choices)
        ]

    def _refuse_crowd(self, answers: int) -> None:
        most = self.config.slots + self.config.queue_limit
        if answers > most:
            raise TooManyAnswers(
                f"The request asks for {answers} answers; this engine takes {most} at once.", param="n"
            )

    def _cuts(self, prompt: Sequence[int], of_template: Sequence[int], spans: SpanMap) -> list[int]:
        """Where a prefix can be cut anywhere a prompt is not stopped for them."""
        if not self.llama.needs_checkpoints:
            return []
        return list(of_template) or ([] if spans else raw_cuts(prompt, self.llama.vocabulary.cursor_marker))

    def _sampling(self, request: ChatRequest) -> SamplingParams:
        vocabulary = self.llama.vocabulary
        params = SamplingParams.of(request, self.config, vocabulary.size, vocabulary.end_tokens)
        if self.config.samples_on_device and not self.config.whole_row_sequences:
            self._refuse_whole_vocabulary(params)
        prepare(params, vocabulary)
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
