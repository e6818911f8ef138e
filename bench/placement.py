"""Twenty-two placements: memory predicted from the header, planned by llama.cpp, and as taken by a loaded model.

Each placement is a model, a form (layers, experts, slots, context, K/V types) and a device. With `--gpu-layers=-1` the device
is the machine's card, else ggml's RPC server on loopback stands in for one. One of them is a model of experts on a card that
holds 16 of its 25 parts. Beside them stand the cards that nobody has here: what fits there, or the refusal and its hint.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.models import SHAPES, write_empty
from bench.report import print_table
from bench.servers import compute_threads, model_path
from bench.vocabulary import ROOT, qwen35
from engines.config import EngineConfig
from pools.gguf_header import read_header
from pools.ledger import Form, ModelFacts
from pools.ledger_predict import predict
from pools.micro_batch import open_form
from pools.placement import Preview, Room, fit, previews, sized
from pools.placement_rooms import whole_card_bytes

CARDS = {"Tesla P100": 16, "RTX 3060": 12, "RTX 5060 Ti": 16}  # GB as sold
CARD_HOST_BYTES = 32 << 30
CAP_PARTS, WHOLE_PARTS = 16, 25
PROBE_TIMEOUT_S = 240.0
STAND_IN = "RPC0"
ALLOWED_ERROR = 0.05


@dataclass(frozen=True)
class Placed:
    """One placement to measure; `on_card` False: all on the CPU. `is_capped`: its form is whatever fits the capped card."""

    model: str
    form: Form
    on_card: bool = True
    is_capped: bool = False
    mtp: bool = False


def small_placements() -> list[Placed]:
    """Placements of models that two CPU cores load in a second or two."""
    plain = Form(host_cache_bytes=0)

    def form(**values: Any) -> Form:
        return dataclasses.replace(plain, **values)

    both: dict[str, Any] = {"kv_type_k": "q8_0", "kv_type_v": "q8_0"}
    # One slot: with more, rows of logits come on top of the first ones when drafts are first verified.
    drafts: dict[str, Any] = {"slots": 1, "context_tokens": 16384, "draft_tokens": 2, "uses_draft_head": True}
    return [
        Placed("dense", form(gpu_layers=0), on_card=False),
        Placed("dense", form(gpu_layers=0, slots=8, context_tokens=2048, **both), on_card=False),
        Placed("dense", form(gpu_layers=0, mmap=False), on_card=False),
        Placed("dense", form()),
        Placed("dense", form(gpu_layers=5)),
        Placed("dense", form(slots=1, context_tokens=32768, **both)),
        Placed("kv", form(gpu_layers=0, slots=2, context_tokens=8192, **both), on_card=False),
        Placed("kv", form(slots=1, context_tokens=32768)),
        Placed("kv", form(micro_batch_tokens=128)),
        Placed("kv", form(batch_tokens=4096, micro_batch_tokens=2048)),
        Placed("hybrid", form(gpu_layers=0), on_card=False),
        Placed("hybrid", form()),
        Placed("hybrid", form(gpu_layers=4)),
        Placed("hybrid", form(slots=16, context_tokens=2048, checkpoints=8)),
        Placed("hybrid-drafts", form(gpu_layers=0, **drafts), on_card=False, mtp=True),
        Placed("hybrid-drafts", form(**drafts), mtp=True),
        Placed("moe-scaled", form()),
        Placed("moe-scaled", form(batch_tokens=4096, micro_batch_tokens=2048)),
        Placed("moe-scaled", form(cpu_moe_layers=6)),
        Placed("moe-scaled", form(cpu_moe_layers=12)),
        Placed("moe-scaled", form(gpu_layers=6)),
        Placed("moe-scaled", form(slots=2), is_capped=True),
    ]


def large_placements(model: str) -> list[Placed]:
    """Placements of a model that needs a real card."""
    plain = Form(host_cache_bytes=0)
    return [
        Placed(model, dataclasses.replace(plain, context_tokens=8192)),
        Placed(model, dataclasses.replace(plain, slots=16, kv_type_k="q8_0", kv_type_v="q8_0", cpu_moe_layers=10)),
        Placed(model, dataclasses.replace(plain, slots=2), is_capped=True),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", help="a model that needs a card: synthetic:35b-a3b, or a path")
    parser.add_argument("--only", default="", help="measure placements of these small models only, comma-separated")
    parser.add_argument("--budget-s", type=float, default=600.0, help="no placement begins after this")
    parser.add_argument("--out", type=Path, help="file for all figures")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures and prints; the answer is the last line of the command. Raises BenchError."""
    started_s = time.monotonic()
    real_card = options.gpu_layers != 0
    wanted = [one for one in small_placements() if not options.only or one.model in options.only.split(",")]
    if options.model and real_card:
        wanted = large_placements(options.model.removeprefix("synthetic:")) + wanted
    rows: list[dict[str, Any]] = []
    left_out = 0
    with contextlib.nullcontext(None) if real_card else _stand_in_card() as peer:
        for placement in wanted:
            if time.monotonic() - started_s > options.budget_s:
                left_out += 1
                continue
            rows.append(_measure(placement, options, peer))
    absent = absent_cards()
    _print(rows, absent)
    answer = _summary(rows, absent, left_out, real_card)
    if options.out:
        options.out.write_text(json.dumps({**answer, "rows": rows, "absent_cards": absent}, indent=1))
    return answer


def _summary(
    rows: list[dict[str, Any]], absent: list[dict[str, Any]], left_out: int, real_card: bool
) -> dict[str, Any]:
    planned = [error for row in rows for error in row["planned_error"].values()]
    header = [error for row in rows for error in row["header_error"].values()]
    capped = [row for row in rows if row["cap_bytes"]]
    return {
        "bench": "placement",
        "card": "real" if real_card else "stand-in",
        "placements": len(rows),
        "left_out": left_out,
        "planned_error_max": max(planned, default=None),
        "header_error_max": max(header, default=None),
        "within": ALLOWED_ERROR,
        "all_within": bool(rows) and max(planned) <= ALLOWED_ERROR and max(header) <= ALLOWED_ERROR,
        "capped": [
            {key: row[key] for key in ("model", "form", "cap_bytes", "card_bytes", "whole_bytes")}
            | {"fits": row["card_bytes"] <= row["cap_bytes"]}
            for row in capped
        ],
        "absent_cards": len(absent),
    }


# --- one placement ------------------------------------------------------------------------------------


def facts_of(path: Path) -> ModelFacts:
    """A file's facts as the pool keeps them."""
    header = read_header(path)
    values = {key: value for key, value in dataclasses.asdict(header).items() if key != "path"}
    return ModelFacts.from_header(json.loads(json.dumps(values)), header.size_bytes)


def _measure(placement: Placed, options: argparse.Namespace, peer: str | None) -> dict[str, Any]:
    path = model_path(f"synthetic:{placement.model}" if placement.model in SHAPES else placement.model)
    facts, cap_bytes = facts_of(path), 0
    form = dataclasses.replace(placement.form, copies_weights=peer is None)
    whole_bytes = predict(facts, dataclasses.replace(form, gpu_layers=-1)).device.total_bytes
    if placement.is_capped:
        cap_bytes = whole_bytes * CAP_PARTS // WHOLE_PARTS
        room = Room(0, "capped card", cap_bytes, CARD_HOST_BYTES, CARD_HOST_BYTES, is_card=True)
        chosen = fit(facts, form, room)
        if not isinstance(chosen, Preview):
            raise BenchError(f"{placement.model} does not fit the capped card: {chosen}")
        form = chosen.form
    config = _config(placement, form, path, options, has_stand_in=peer is not None)
    figures = _probe(config, peer)
    card = next((name for name in figures["measured"] if name != "CPU"), None)
    prediction = predict(facts, form)
    predicted = {"CPU": prediction.host.loaded_bytes}
    if card is not None:
        predicted[card] = prediction.device.loaded_bytes
    measured = {device: part["loaded"] for device, part in figures["measured"].items()}
    return {
        "model": placement.model,
        "form": Preview(0, form, prediction, 0, 0, 0.0).label,
        "config": {key: getattr(config, key) for key in ("gpu_layers", "cpu_moe_layers", "slots", "context_tokens")},
        "header_bytes": predicted,
        "planned_bytes": {device: part["loaded"] for device, part in figures["predicted"].items()},
        "measured_bytes": measured,
        "by_kind": figures["measured"],
        "header_kinds": {"CPU": prediction.host.by_kind(), "card": prediction.device.by_kind()},
        "planned_error": figures["error_share"],
        "header_error": {name: _error(predicted[name], size) for name, size in measured.items() if name in predicted},
        "outside_bytes": figures["taken_at_load"],
        "cap_bytes": cap_bytes,
        "card_bytes": measured.get(card, 0) if card else 0,
        "whole_bytes": whole_bytes,
    }


def _error(predicted_bytes: int, measured_bytes: int) -> float:
    return round(abs(predicted_bytes - measured_bytes) / measured_bytes, 4) if measured_bytes else 0.0


def _config(
    placement: Placed, form: Form, path: Path, options: argparse.Namespace, *, has_stand_in: bool
) -> EngineConfig:
    devices: tuple[str, ...] = ("none",) if not placement.on_card else (STAND_IN,) if has_stand_in else ()
    return EngineConfig(
        model_path=str(path),
        model_name="m",
        slots=form.slots,
        context_tokens=form.context_tokens,
        kv_type_k=form.kv_type_k,
        kv_type_v=form.kv_type_v,
        checkpoints=form.checkpoints,
        batch_tokens=form.batch_tokens,
        micro_batch_tokens=form.micro_batch_tokens,
        whole_vocabulary_slots=form.whole_vocabulary_slots,
        gpu_layers=form.gpu_layers,
        cpu_moe_layers=form.cpu_moe_layers,
        devices=devices,
        mmap=form.mmap,
        host_cache_bytes=0,
        speculation="mtp" if placement.mtp else "none",
        draft_tokens=form.draft_tokens or 2,
        threads=compute_threads(options.threads),
    )


def _probe(config: EngineConfig, peer: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engine.json"
        path.write_text(config.to_json())
        command = [sys.executable, "-m", "bench.placement_probe", "--config", str(path)]
        command += ["--peer", peer] if peer and config.devices == (STAND_IN,) else []
        result = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, cwd=ROOT)
    if result.returncode != 0:
        raise BenchError(f"a placement could not be measured:\n{result.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return figures


@contextlib.contextmanager
def _stand_in_card() -> Iterator[str]:
    """ggml's RPC server on a free loopback port; its endpoint."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "bench.placement_probe", "--serve", endpoint]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 30
        while not _answers(endpoint):
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchError("ggml's RPC server did not start")
            time.sleep(0.1)
        yield endpoint
    finally:
        process.terminate()
        process.wait(10)


def _answers(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


# --- cards that are not here --------------------------------------------------------------------------


def absent_cards() -> list[dict[str, Any]]:
    """What fits on the owners' cards, by header alone: models of real size whose weights nobody wrote."""
    found = []
    usual = open_form(Form())
    wishes = {
        "as loaded on demand": usual,
        "8 slots of 131,072": dataclasses.replace(usual, slots=8, context_tokens=131072),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in ("35b-a3b", "27b"):
            path = Path(folder) / f"{name}.gguf"
            write_empty(path, SHAPES[name], qwen35())
            facts = facts_of(path)
            for card, size_gb in CARDS.items():
                free_bytes = whole_card_bytes(size_gb << 30)
                room = Room(0, card, free_bytes, CARD_HOST_BYTES, CARD_HOST_BYTES, True, free_bytes)
                for wish_name, wish in wishes.items():
                    found.append(_on_absent_card(name, card, wish_name, facts, wish, room))
    return found


def _on_absent_card(model: str, card: str, wish_name: str, facts: ModelFacts, wish: Form, room: Room) -> dict[str, Any]:
    answer = fit(facts, wish, room)
    chosen = answer if isinstance(answer, Preview) else answer.nearest
    if chosen is not None and not isinstance(fit(facts, chosen.form, room), Preview):
        raise BenchError(f"the hint for {model} on {card} does not fit: {chosen.label}")
    return {
        "model": model,
        "card": card,
        "wish": wish_name,
        "fits": isinstance(answer, Preview),
        "form": chosen.label if chosen else None,
        "reason": "" if isinstance(answer, Preview) else answer.reason,
        "card_left_bytes": chosen.card_left_bytes if chosen else None,
        "previews": len(previews(facts, wish, room)),
    }


def _print(rows: list[dict[str, Any]], absent: list[dict[str, Any]]) -> None:
    columns = ["model", "form", "device", "header", "planned", "taken", "planned off", "header off"]
    table = []
    for row in rows:
        for device, size in row["measured_bytes"].items():
            table.append(
                [
                    row["model"],
                    row["form"] + (f" (cap {sized(row['cap_bytes'])})" if row["cap_bytes"] and device != "CPU" else ""),
                    device,
                    sized(row["header_bytes"].get(device, 0)),
                    sized(row["planned_bytes"].get(device, 0)),
                    sized(size),
                    f"{row['planned_error'].get(device, 0):.2%}",
                    f"{row['header_error'].get(device, 0):.2%}",
                ]
            )
    print_table("predicted and taken", columns, table)
    columns = ["model", "card", "wish", "fits", "form, or the nearest that fits", "left on the card", "previews"]
    table = [
        [
            row["model"],
            row["card"],
            row["wish"],
            "yes" if row["fits"] else "no",
            row["form"] or row["reason"],
            sized(row["card_left_bytes"]) if row["card_left_bytes"] is not None else "",
            str(row["previews"]),
        ]
        for row in absent
    ]
    print_table("cards that are not here, by header alone", columns, table)
