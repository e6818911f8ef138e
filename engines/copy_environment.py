"""How a process is started that copies gigabytes of KV state by the CPU: settings that glibc reads once, from its environment.

Measured on an AMD EPYC (family 25) under glibc 2.36, 128 MB in blocks of 4 MB: taking a state out of llama.cpp went from 8.1 ms
to 6.2, bringing one in from 17.9 to 10.7. There `rep movsb` is slow between addresses of unlike alignment, which rows inside a
state always have; and a KV cache of ordinary pages costs a walk of the page tables every 4 KiB. A GPU's copies do not pass here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
# Huge pages where malloc maps memory; vector instructions for copies of any size below that for which caches are passed by.
TUNABLES = "glibc.malloc.hugetlb=1:glibc.cpu.x86_rep_movsb_threshold=0x10000000"


def copy_environment(around: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What is added to the environment; nothing where somebody made settings of his own. Other C libraries pass it over."""
    return {} if around.get(VARIABLE) else {VARIABLE: TUNABLES}
