"""The preview of a model's placements as a table of the admin."""

from __future__ import annotations

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from pools.fit import DeviceFit, device_fits
from pools.placement import Preview, Refusal, sized


def fit_table(model_name: str) -> SafeString | str:
    """Device by device: how the model would be loaded there now, or why not and what would fit; then the other forms."""
    found = device_fits(model_name)
    if found is None:
        return "It has no file yet."
    _, fits = found
    if not fits:
        return "No host that serves has its file, or none has been heard of yet."
    return format_html_join("", "{}", ((_device(one),) for one in fits))


def _device(one: DeviceFit) -> SafeString:
    room = one.room
    free = f"{sized(max(room.card_bytes, 0))} on the card, " if room.is_card else ""
    free += f"{sized(max(min(room.host_bytes, room.resident_bytes), 0))} of host memory"
    head = format_html("<h4><strong>{}</strong>: {} free for engines</h4>", one.device, free)
    if isinstance(one.answer, Refusal):
        verdict = format_html("<p>It does not fit as wished: {}.</p>", str(one.answer))
    else:
        verdict = format_html("<p>It would be loaded with {}.</p>", one.answer.label)
    rows = format_html_join(
        "", "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>", (_row(preview, one) for preview in one.previews)
    )
    if not rows:
        return format_html("{}{}", head, verdict)
    columns = "<tr><th>form</th><th>takes</th><th>left on the card</th><th>left on the host</th></tr>"
    table = format_html("<table><thead>" + columns + "</thead><tbody>{}</tbody></table>", rows)
    return format_html(
        "{}{}<details><summary>{} forms that fit</summary>{}</details>", head, verdict, len(one.previews), table
    )


def _row(preview: Preview, one: DeviceFit) -> tuple[str, str, str, str]:
    parts = preview.prediction.device if one.room.is_card and preview.form.gpu_layers else preview.prediction.host
    kinds = ", ".join(f"{kind} {sized(size)}" for kind, size in parts.by_kind().items())
    left = sized(preview.card_left_bytes) if one.room.is_card else ""
    return preview.label, f"{sized(parts.total_bytes)} ({kinds})", left, sized(preview.host_left_bytes)
