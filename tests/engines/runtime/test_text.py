"""Text leaves only as whole characters and never as part of a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.runtime.sampler import TokenLogprob
from engines.runtime.text import TextAssembler


def assemble(pieces: list[bytes], stops: list[str]) -> tuple[list[str], bool]:
    text = TextAssembler(stops)
    released = []
    for piece in pieces:
        released.append(text.feed(piece).text)
        if text.stopped:
            return released, True
    released.append(text.finish().text)
    return released, False


def test_it_holds_back_split_characters() -> None:
    raw = "né😀x".encode()
    released, _ = assemble([raw[i : i + 1] for i in range(len(raw))], [])
    assert released == ["n", "", "é", "", "", "", "😀", "x", ""]


def test_it_never_shows_a_stop_string_nor_its_beginning() -> None:
    released, stopped = assemble([b"Hello ", b"<|", b"x", b"<", b"|e", b"nd|", b"> more"], ["<|end|>"])
    assert stopped
    assert released == ["Hello ", "", "<|x", "", "", "", ""]


def test_it_lets_go_of_what_only_looked_like_a_stop_string() -> None:
    assert assemble([b"xaa", b"c"], ["aaab"]) == (["x", "aac", ""], False)
    assert assemble([b"xaa"], ["aaab"]) == (["x", "aa"], False)
    assert assemble([b"aaab"], ["aab"]) == (["a"], True)


def test_the_longest_of_two_stops_that_end_together_is_cut() -> None:
    assert assemble([b"xyEND"], ["END", "yEND"]) == (["x"], True)


@given(st.text(max_size=60), st.lists(st.text(min_size=1, max_size=4), max_size=3), st.data())
def test_any_split_of_a_text_gives_the_text_up_to_the_first_stop(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    # The stop whose end comes first wins; of those that end together, the longest.
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    expected = text if not ends else text[: min(ends)[0] + min(ends)[1]]
    released, stopped = assemble(pieces, stops)
    assert "".join(released) == expected
    assert stopped == bool(ends)


@given(st.lists(st.binary(max_size=5), max_size=20))
def test_invalid_bytes_become_replacement_characters_as_in_one_piece(pieces: list[bytes]) -> None:
    released, _ = assemble(pieces, [])
    assert "".join(released) == b"".join(pieces).decode("utf-8", "replace")


def test_log_probabilities_leave_with_their_text_and_are_dropped_with_a_stop() -> None:
    text = TextAssembler(["END"])
    entries = [TokenLogprob(token, -1.0, ()) for token in range(5)]
    assert text.feed(b"a", entries[0]).logprobs == (entries[0],)
    assert text.feed(b"E", entries[1]).logprobs == ()
    assert text.feed(b"x", entries[2]).logprobs == (entries[1], entries[2])
    assert text.feed(b"EN", entries[3]).logprobs == ()
    assert text.feed(b"D", entries[4]).logprobs == ()
    assert text.stopped
    assert text.finish().logprobs == ()


def test_finishing_without_a_stop_releases_everything() -> None:
    text = TextAssembler(["END"])
    entry = TokenLogprob(1, -1.0, ())
    assert text.feed(b"EN", entry).text == ""
    released = text.finish()
    assert (released.text, released.logprobs) == ("EN", (entry,))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_character_cut_off_at_the_end_becomes_one_replacement(count: int) -> None:
    released, _ = assemble(["😀".encode()[:count]], [])
    assert "".join(released) == "\ufffd"
