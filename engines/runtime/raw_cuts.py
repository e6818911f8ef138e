"""Where a prompt that no template wrote leaves states behind: its beginnings that a later one is likely to have.

The same again, or with more behind it, needs one near the end: what follows may make other tokens of the last few characters.
A shorter one, of a text that somebody is writing, finds one at three quarters of it; a text around a cursor one where the part
before the cursor ends. What else prompts have in common is found when the second of them comes (`PrefixSearch.cut_at_fork`).
"""

from __future__ import annotations

from collections.abc import Sequence

# Of a text's last tokens so many may be others once it goes on.
CHANGING_TOKENS = 4
# A cut nearer to the beginning, or to the next one, saves too little to hold a sequence.
MIN_CUT_TOKENS, MIN_GAP_TOKENS = 16, 64


def raw_cuts(prompt: Sequence[int], cursor_marker: int) -> list[int]:
    """Cuts of a prompt, ascending. `cursor_marker` is the token that stands behind the text before a cursor (below 0: none)."""
    end = len(prompt) - CHANGING_TOKENS
    inner = end * 3 // 4
    if cursor_marker >= 0 and cursor_marker in prompt:
        inner = prompt.index(cursor_marker) - CHANGING_TOKENS
    cuts = [inner, end] if end - inner >= MIN_GAP_TOKENS else [end]
    return [cut for cut in cuts if cut >= MIN_CUT_TOKENS]
