"""What wants a person's look: of a host another release, a clock that is off, cards that cannot be read, builds of llama.cpp that
failed or that its engines have not taken yet; engines that failed, or wait for what nobody brings them."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from engines.reconcile import MAX_RESTARTS
from engines.services import EngineView
from pools.choices import JobKind, JobState
from pools.jobs import JobView
from pools.services import HostView

# Commands expire after some seconds, by the clock of the machine that takes them.
CLOCK_TOLERANCE_S = 2.0


@dataclass(frozen=True)
class Attention:
    """Something that wants a decision: which object, what happened, what to do about it."""

    severity: str
    subject: str
    message: str
    hint: str


class OpenWork(Protocol):
    """A build or a download that waits or runs."""

    @property
    def host(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def subject(self) -> str: ...


def is_waiting(engine: EngineView) -> bool:
    """Whether its start was put off, which is no failure: its card's llama.cpp, or its model, is not there yet."""
    return engine.state == "failed" and engine.wanted == "running" and not engine.restarts


def engine_troubles(
    hosts: Iterable[HostView], engines: Iterable[EngineView], work: Collection[OpenWork]
) -> Iterator[Attention]:
    """What is wrong with engines that do not come up. One that waits for work that is on its way wants nobody's look."""
    by_id = {host.id: host for host in hosts}
    for engine in engines:
        if engine.state != "failed":
            continue
        subject, message = f"Engine {engine.name}", engine.last_error or "failed."
        if is_waiting(engine):
            host = by_id.get(engine.host_id)
            if host is None or not any(_brings(one, engine, host) for one in work):
                hint = "It starts by itself as soon as that is there; nothing has to be done to the engine."
                yield Attention("warning", subject, message, hint)
        elif engine.wanted == "running" and engine.restarts <= MAX_RESTARTS:
            hint = f"It is started again by itself, {MAX_RESTARTS} times at most; this was failure {engine.restarts}."
            yield Attention("failure", subject, message, f"{hint} Its log: engines/{engine.id}/engine.log.")
        else:
            hint = "It is not started again by itself: correct the cause, then choose Start under Engines in the admin."
            yield Attention("failure", subject, message, hint)


def _brings(work: OpenWork, engine: EngineView, host: HostView) -> bool:
    """Whether the work may end what the engine waits for."""
    if work.host != host.name:
        return False
    return work.kind == JobKind.DOWNLOAD or _device_arch(engine, host) in work.subject.split()


def _device_arch(engine: EngineView, host: HostView) -> str:
    """What a library for the engine's device is built for."""
    device = next((gpu for gpu in host.gpus if gpu.id == engine.gpu_id), None)
    return device.arch if device is not None and device.kind == "cuda" else "cpu"


def host_warnings(host: HostView) -> Iterator[Attention]:
    """The warnings about a host that is up, and about its devices."""
    subject = f"Host {host.name}"
    if host.schema_differs:
        message = f"runs {host.version}, whose tables differ from this site's."
        yield Attention("warning", subject, message, "Bring both to the same release, and start its head again.")
    elif host.version_differs:
        message = f"runs {host.version}, this site another release."
        yield Attention("warning", subject, message, "Bring both to the same release when it suits.")
    if host.clock_offset_s is not None and abs(host.clock_offset_s) > CLOCK_TOLERANCE_S:
        message = (
            f"has a clock that is {host.clock_offset_s:+.1f} s off the database's, so commands may expire on their way."
        )
        yield Attention("warning", subject, message, "Set it by NTP, such as systemd-timesyncd or chrony.")
    if host.problem:
        yield Attention("warning", subject, f"{host.problem}.", host.problem_hint)
    for gpu in host.gpus:
        if gpu.problem and gpu.problem != host.problem:
            yield Attention("warning", f"{gpu.name} of {host.name}", f"{gpu.problem}.", gpu.problem_hint)


def build_warnings(
    hosts: Iterable[HostView], engines: Iterable[EngineView], builds: Iterable[JobView]
) -> Iterator[Attention]:
    """The warnings about builds of these hosts, each the newest for its architectures."""
    by_name = {host.name: host for host in hosts}
    running = [engine for engine in engines if engine.state == "ready" and engine.ready_at is not None]
    for build in builds:
        host = by_name.get(build.host)
        if host is None:
            continue
        if build.state == JobState.FAILED:
            said = build.message.strip().splitlines() or ["it did not say why"]
            hint = f"{build.hint} Ask for it again under Jobs in the admin, or delete it there.".strip()
            yield Attention(
                "warning", f"llama.cpp for {build.subject} on {host.name}", f"was not built: {said[-1]}", hint
            )
        elif build.message:
            # Its engines crashed with it; engines/native_faults.py says so.
            yield Attention("warning", f"llama.cpp for {build.subject} on {host.name}", f"{build.message}.", build.hint)
        elif build.result.get("built") != "before":
            for engine in running:
                if _came_before(engine, build, host):
                    message = "runs with another llama.cpp than the one that was built for its device since it started."
                    hint = (
                        "It takes that by itself once nobody has asked it for a minute, if its host has a store for what it"
                        " keeps; else when you start it again."
                    )
                    yield Attention("warning", f"Engine {engine.name}", message, hint)


def _came_before(engine: EngineView, build: JobView, host: HostView) -> bool:
    """Whether the engine was up before a library for its device was."""
    if engine.host_id != host.id or _device_arch(engine, host) not in build.subject.split():
        return False
    return engine.ready_at is not None and build.ended_at is not None and engine.ready_at < build.ended_at
