"""Head and tail of an output flood, in bounded memory, cut between letters (public case F01)."""

import random

import pytest

from burnish.envs.sandbox.capture import Capture


def captured(data: bytes, cap: int, chunk: int = 4096) -> Capture:
    capture = Capture(cap)
    for start in range(0, len(data), chunk):
        capture.feed(data[start : start + chunk])
    return capture


@pytest.mark.parametrize(("size", "truncated"), [(9_999, False), (10_000, False), (10_001, True), (16_384, True)])
def test_truncation_is_told_exactly_at_the_cap(size, truncated):
    capture = captured(b"x" * size, 10_000)
    assert (capture.truncated, capture.total_bytes) == (truncated, size)
    assert (capture.text() == "x" * size) is not truncated


def test_head_and_tail_are_kept_and_the_omission_is_counted():
    text = captured(b"A" * 600 + b"B" * 9000 + b"C" * 600, 1000).text()
    assert text == "A" * 500 + "\n[... 9200 omitted bytes ...]\n" + "C" * 500


@pytest.mark.parametrize("chunk", [1, 7, 1200])
def test_letters_are_never_cut_in_two(chunk):
    text = captured("é".encode() * 600, 1001, chunk).text()
    assert text.count("é") == 500
    assert "\ufffd" not in text
    assert "[... 200 omitted bytes ...]" in text
    assert "\ufffd" not in captured("a😀".encode() * 999, 101, chunk).text()


def test_memory_stays_within_the_cap_plus_a_constant():
    capture = Capture(10_000)
    for _ in range(500):
        capture.feed(b"y\n" * 10_000)
    assert capture.total_bytes == 10_000_000
    assert len(capture.head) + len(capture.tail) < 40_000


def test_escape_sequences_never_reach_the_agent_whole_or_half():
    red = b"\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b]52;c;aGk=\x1b\\plain\x1b(B\n"
    assert captured(red, 1000).text() == "red plain\n"
    for cap in range(16, 400, 3):
        text = captured(red * 60, cap, 11).text()
        assert "\x1b" not in text
        assert not any(half in text for half in ("31m", "0;title", "[0m", "52;c", "aGk")), (cap, text)


def test_carriage_returns_do_not_hide_text_and_binary_does_not_fail():
    assert captured(b"secret\rshown\r\nnext\x00\x07", 100).text() == "secret\nshown\nnext"
    data = random.Random(0).randbytes(100_000)
    assert isinstance(captured(data, 1000).text(), str)
    assert captured(b"\xff\xfe\xed\xa0\x80", 100).text().count("\ufffd") == 5
