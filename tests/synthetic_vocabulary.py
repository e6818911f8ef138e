"""The tokenizer of the synthetic models, and the text that tie-free ones of them write.

A byte-level BPE: token b is byte b, then a handful of merges, three special tokens, and fillers (` w270`, ...) up to
the vocabulary's size. Any UTF-8 text becomes tokens and comes back exactly.

A tie-free model follows a permutation of its vocabulary. From a newline on, with which every chat prompt ends, the text
runs through a cycle of single-byte tokens: printable ASCII, or characters of two to four bytes each. The cycle never
meets an end token, and its text, tokenised again, gives the same tokens.
"""

import random
from collections.abc import Iterable

NEWLINE = ord("\n")
MERGES = ("t h", "h e", "i n", "e r", "a n", "Ġ t", "Ġt h")
FIRST_SPECIAL = 256 + len(MERGES)
IM_START, IM_END, END_OF_TEXT = FIRST_SPECIAL, FIRST_SPECIAL + 1, FIRST_SPECIAL + 2
FIRST_FILLER = FIRST_SPECIAL + 3
SPECIAL_TEXTS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def next_token(seed: int, vocab: int, token: int, *, utf8_cycle: bool = False) -> int:
    """The greedy successor of `token` in every tie-free model written with these values."""
    return successors(seed, vocab, utf8_cycle=utf8_cycle)[token]


def successors(seed: int, vocab: int, *, utf8_cycle: bool = False) -> tuple[int, ...]:
    """A permutation of the vocabulary: one cycle through text, one through all other tokens, end tokens stay put."""
    rng = random.Random(seed)
    cycle = _utf8_cycle(rng) if utf8_cycle else _ascii_cycle(rng)
    ends = {IM_END, END_OF_TEXT}
    others = [token for token in range(vocab) if token not in ends and token not in set(cycle)]
    rng.shuffle(others)
    after = list(range(vocab))
    for ring in (cycle, others):
        for token, following in zip(ring, ring[1:] + ring[:1], strict=True):
            after[token] = following
    return tuple(after)


def _ascii_cycle(rng: random.Random) -> list[int]:
    """Newline and all printable ASCII; no neighbours that the tokenizer would merge."""
    merged = {(_UNICODE_BYTES[left], _UNICODE_BYTES[right]) for left, right in map(str.split, MERGES) if len(left) == 1}
    cycle = [NEWLINE, *range(0x20, 0x7F)]
    while True:
        rng.shuffle(cycle)
        if merged.isdisjoint(zip(cycle, cycle[1:] + cycle[:1], strict=True)):
            return cycle


def _utf8_cycle(rng: random.Random) -> list[int]:
    """Newline, then letters of many scripts and an emoji, chosen so that no byte occurs twice."""
    ranges = [(0xC0, 0x2FF), (0x391, 0x3FF), (0x400, 0x4FF), (0x3041, 0x3096), (0x4E00, 0x9FFF), (0xAC00, 0xCFFF)]
    characters = [chr(point) for first, last in ranges for point in range(first, last + 1)]
    rng.shuffle(characters)
    emoji = [chr(point) for point in range(0x1F600, 0x1F640)]
    used: set[int] = {NEWLINE}
    chosen: list[bytes] = []
    # the emoji first, then the longer ones: a lead byte is good for one character only, and short ones use up fewer
    for character in [rng.choice(emoji), *sorted(characters, key=lambda c: -len(c.encode()))]:
        encoded = character.encode()
        if len(chosen) < 30 and len(set(encoded)) == len(encoded) and used.isdisjoint(encoded):
            chosen.append(encoded)
            used.update(encoded)
    rng.shuffle(chosen)
    return [NEWLINE, *b"".join(chosen)]


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte in a byte-level BPE: itself if printable Latin-1, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


_BYTE_ALPHABET = _byte_alphabet()
_UNICODE_BYTES = {letter: byte for byte, letter in enumerate(_BYTE_ALPHABET)}


def token_texts(vocab: int) -> list[str]:
    """The tokens as a GGUF stores them."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    fillers = [f"Ġw{token}" for token in range(FIRST_FILLER, vocab)]
    return [*_BYTE_ALPHABET, *merged, *SPECIAL_TEXTS, *fillers]


def token_text(tokens: Iterable[int]) -> bytes:
    """The bytes that tokens stand for; special tokens stand for nothing."""
    return b"".join(_token_bytes(token) for token in tokens)


def _token_bytes(token: int) -> bytes:
    if token < 256:
        return bytes([token])
    if token < FIRST_SPECIAL:
        return bytes(_UNICODE_BYTES[letter] for letter in MERGES[token - 256].replace(" ", ""))
    return b"" if token < FIRST_FILLER else f" w{token}".encode()
