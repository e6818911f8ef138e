"""What of a host wants a person's look: another release, a clock that is off, cards that cannot be read."""

from collections.abc import Iterator
from dataclasses import dataclass

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
