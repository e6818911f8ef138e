"""The processor's name as people know it."""

import pytest

from pools.probe import _named_cpu


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC 7763\n", "AMD EPYC 7763"),
        ("processor\t: 0\nHardware\t: BCM2835\nModel\t\t: Raspberry Pi 5\n", "BCM2835"),
        ("processor\t: 0\n", ""),
        ("", ""),
    ],
)
def test_it_is_the_model_name_and_not_the_models_number(cpuinfo: str, name: str) -> None:
    assert _named_cpu(cpuinfo) == name
