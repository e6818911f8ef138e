"""An engine as a slow card would run it: `python -m tests.slow_card STEP_S TOKEN_S --config ...`.

Everything is the real engine; only each call of llama.cpp takes longer, as long as a card would need for it: a step without a
prompt STEP_S more, and each token of a prompt's chunk TOKEN_S. The processor is free meanwhile, so that engines of unlike
speed do not get in each other's way.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

# Smaller batches are steps of streams that decode.
CHUNK_TOKENS = 9


def slowed(decode: Callable[[Any, Any], int], step_s: float, token_s: float) -> Callable[[Any, Any], int]:
    def slow(context: Any, batch: Any) -> int:
        status = decode(context, batch)
        time.sleep(step_s if batch.n_tokens < CHUNK_TOKENS else token_s * batch.n_tokens)
        return status

    return slow


if __name__ == "__main__":
    import llama_cpp

    from engines.runtime.__main__ import main

    step_text, token_text = sys.argv[1:3]
    llama_cpp.llama_decode = slowed(llama_cpp.llama_decode, float(step_text), float(token_text))
    sys.exit(main(sys.argv[3:]))
