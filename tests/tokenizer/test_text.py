"""Text that streams equals the text that is made in one go, however it is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcl.errors import UsageError
from llmcl.tokenizer.text import Detokenizer, StopMatcher

# Tokens that end anywhere: in the middle of characters of 2, 3 and 4 bytes, or holding what is never UTF-8.
TOKENS = [
    b"",
    b" ",
    b"a",
    b" the",
    *(bytes([byte]) for byte in "é日🙂".encode()),
    "é".encode(),
    b"\xff",
    b"x\xe6\x97",
]
token_ids = st.lists(st.integers(0, len(TOKENS) - 1), max_size=40)


def pieces(ids: list[int], detokenizer: Detokenizer) -> list[str]:
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@given(token_ids)
def test_detokenizer_equals_decoding_everything_at_once(ids: list[int]) -> None:
    whole = b"".join(TOKENS[i] for i in ids).decode("utf-8", "replace")
    assert "".join(pieces(ids, Detokenizer(TOKENS.__getitem__))) == whole
    stripped = pieces(ids, Detokenizer(TOKENS.__getitem__, strip_leading_space=True))
    assert "".join(stripped) == whole.removeprefix(" ")


@given(st.text(max_size=20))
def test_detokenizer_of_single_bytes_gives_whole_characters(text: str) -> None:
    data = text.encode()
    detokenizer = Detokenizer(lambda i: data[i : i + 1])
    seen = ""
    for index in range(len(data)):
        seen += detokenizer.push(index)
        assert seen == data[: index + 1].decode("utf-8", "ignore"), "late, or half a character"
    assert seen + detokenizer.flush() == text


def test_detokenizer_keeps_only_the_bytes_of_an_incomplete_character() -> None:
    data = "日本".encode()
    detokenizer = Detokenizer(lambda i: data[i : i + 1])
    assert [detokenizer.push(i) for i in range(6)] == ["", "", "日", "", "", "本"]


def test_detokenizer_flush_shows_what_is_incomplete_and_begins_anew() -> None:
    detokenizer = Detokenizer([b" a", b"\xe6\x97"].__getitem__, strip_leading_space=True)
    assert pieces([0, 0, 1], detokenizer) == ["a", " a", "", "\ufffd"]
    assert pieces([0], detokenizer) == ["a", ""]


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: up to the stop string that ends first, of several the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


stop_strings = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


@given(st.lists(st.text("abc", max_size=5), max_size=12), stop_strings)
def test_stop_matcher_equals_the_definition_however_the_text_is_cut(chunks: list[str], stops: list[str]) -> None:
    text = "".join(chunks)
    expected, stopped = cut_at_stop(text, stops)
    matcher = StopMatcher(stops)
    shown, received, matched = "", "", False
    for chunk in chunks:
        safe, matched = matcher.push(chunk)
        shown, received = shown + safe, received + chunk
        assert expected.startswith(shown)
        assert matched == cut_at_stop(received, stops)[1], "noticed too early or too late"
        if not matched:
            held = received[len(shown) :]
            assert not held or any(stop.startswith(held) for stop in stops), "held back without need"
    assert matched == stopped
    assert shown + matcher.flush() == expected


def test_stop_matcher_holds_back_a_part_of_a_stop_string() -> None:
    matcher = StopMatcher(["</s>"])
    assert [matcher.push(chunk) for chunk in ("1 <", "2 </s", ">tail", "more")] == [
        ("1 ", False),
        ("<2 ", False),
        ("", True),
        ("", True),
    ]
    assert matcher.flush() == ""


def test_stop_matcher_without_stop_strings_passes_everything_on() -> None:
    assert StopMatcher([]).push("abc") == ("abc", False)


def test_stop_matcher_takes_one_string_as_one_stop_string() -> None:
    assert StopMatcher("end").push("the end.") == ("the ", True)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="stop string is empty"):
        StopMatcher(["a", ""])


@pytest.mark.parametrize("stop", [5, None, [5], b"end", ["a", b"end"], [None], [["a"]]])
def test_stop_is_a_string_or_several(stop: Any) -> None:
    with pytest.raises(UsageError, match=r"stop is .*; expected a string or several"):
        StopMatcher(stop)
