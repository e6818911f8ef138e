"""`python pools/nvml_record.py`: what NVML answers on this machine, as one JSON object on standard output.

For tests that replay a real card's answers, and for a report from a machine that is read wrongly. Needs only nvidia-ml-py;
`QUESTIONS` are the calls that `pools.nvml` makes of a card. A refusal is kept as `{"nvml_error": number}`, so that what a card
does not tell is known no less.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

import pynvml

# The calls about one card, with the arguments that follow its handle.
QUESTIONS: dict[str, tuple[int, ...]] = {
    "nvmlDeviceGetUUID": (),
    "nvmlDeviceGetName": (),
    "nvmlDeviceGetCudaComputeCapability": (),
    "nvmlDeviceGetMemoryInfo": (),
    "nvmlDeviceGetUtilizationRates": (),
    "nvmlDeviceGetTemperature": (pynvml.NVML_TEMPERATURE_GPU,),
    "nvmlDeviceGetPowerUsage": (),
    "nvmlDeviceGetEnforcedPowerLimit": (),
    "nvmlDeviceGetClockInfo": (pynvml.NVML_CLOCK_SM,),
    "nvmlDeviceGetMaxClockInfo": (pynvml.NVML_CLOCK_SM,),
    "nvmlDeviceGetCurrPcieLinkGeneration": (),
    "nvmlDeviceGetCurrPcieLinkWidth": (),
    "nvmlDeviceGetMaxPcieLinkGeneration": (),
    "nvmlDeviceGetMaxPcieLinkWidth": (),
    "nvmlDeviceGetPciInfo": (),
    "nvmlDeviceGetComputeRunningProcesses": (),
    "nvmlDeviceGetGraphicsRunningProcesses": (),
    "nvmlDeviceGetMigMode": (),
    "nvmlDeviceGetTotalEccErrors": (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),
    "nvmlDeviceGetCurrentClocksThrottleReasons": (),
}
SYSTEM_QUESTIONS = ("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion", "nvmlSystemGetCudaDriverVersion_v2")


def record() -> dict[str, Any]:
    """Everything of QUESTIONS, of every card. Raises pynvml.NVMLError when NVML itself cannot be used."""
    pynvml.nvmlInit()
    try:
        cards = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            card = pynvml.nvmlDeviceGetHandleByIndex(index)
            asked = {name: (card, *arguments) for name, arguments in QUESTIONS.items()}
            cards.append({name: _answer(getattr(pynvml, name), *arguments) for name, arguments in asked.items()})
        system = {name: _answer(getattr(pynvml, name)) for name in SYSTEM_QUESTIONS}
        return {"label": "recorded", "system": system, "cards": cards}
    finally:
        pynvml.nvmlShutdown()


def _answer(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return _plain(call(*arguments))
    except pynvml.NVMLError as error:
        return {"nvml_error": error.value}


def _plain(value: Any) -> Any:
    """An answer as JSON has it: structures become objects, bytes text."""
    if isinstance(value, ctypes.Structure):
        return {name: _plain(getattr(value, name)) for name in _field_names(value)}
    if hasattr(value, "__dict__"):
        return {name: _plain(field) for name, field in vars(value).items() if not name.startswith("_")}
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _field_names(value: ctypes.Structure) -> list[str]:
    return [field[0] for field in value._fields_]


if __name__ == "__main__":
    json.dump(record(), sys.stdout, indent=1)
    print()
