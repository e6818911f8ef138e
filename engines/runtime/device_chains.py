"""Whether this process's llama.cpp keeps the candidates of chains on a device apart, asked before a model is loaded.

The pinned source does not: where other sequences decode than in the step before, one may be handed a neighbour's candidates
(native/kept_candidates.py, which mends it in our builds). So chains run on a device only in a library that says it does.
"""

from __future__ import annotations

import dataclasses
import logging

from engines.config import EngineConfig
from engines.errors import LibraryUnfit
from engines.runtime.card_code import library_folder
from engines.runtime.llama import keeps_candidates

log = logging.getLogger("hydra.engine")


def with_sound_sampling(config: EngineConfig) -> EngineConfig:
    """The configuration that this library can serve without mixing up sequences: sampling goes to the host where nobody asked for
    the device. Raises LibraryUnfit where somebody did."""
    if not config.samples_on_device or keeps_candidates():
        return config
    fault = f"llama.cpp in {library_folder()} mixes up the candidates of sequences that are sampled on the device"
    hint = "Build one that does not on this host: manage.py build-native"
    if config.sampling != "auto":
        raise LibraryUnfit(fault, f"{hint}; or use sampling auto or host")
    log.warning("%s, so that tokens are chosen on the host, which is slower. %s", fault, hint)
    return dataclasses.replace(config, sampling="host")
