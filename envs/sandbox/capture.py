"""Keeps head and tail of an output stream in bounded memory, and makes text of it. Knows no shell and no engine.

The cap counts bytes. A cut never splits a UTF-8 letter or an escape sequence, and what was left out is counted.
"""

import re

# CSI ... letter, OSC ... BEL or ST, other two-byte escapes; the last branch is an unfinished one at the end of the text
ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-OQ-WYZ\\`-~])")
UNFINISHED_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?|[ -/]*)?\Z")
CONTROL = {code: None for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: None}
# how far before a cut an escape sequence may have begun
LOOK_BACK = 256


class Capture:
    """Bytes go in, at most `cap` of them stay: the first half and the last half."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.head_size = cap // 2
        self.tail_size = cap - self.head_size
        self.total_bytes = 0
        self.head = bytearray()
        # holds up to twice what is needed, so that it is cut rarely
        self.tail = bytearray()

    def feed(self, chunk: bytes | bytearray | memoryview) -> None:
        self.total_bytes += len(chunk)
        room = self.head_size - len(self.head)
        if room > 0:
            self.head += chunk[:room]
            chunk = chunk[room:]
        keep = self.tail_size + LOOK_BACK
        self.tail += chunk[-keep:] if len(chunk) > keep else chunk
        if len(self.tail) > 2 * keep:
            del self.tail[:-keep]

    @property
    def truncated(self) -> bool:
        return self.total_bytes > self.cap

    def raw(self) -> bytes | None:
        """Every byte that came; None when the cap was too small for them."""
        return None if self.truncated else bytes(self.head + self.tail)

    def text(self) -> str:
        """What a terminal would show, without colours, titles and other control; CR starts a new line."""
        if not self.truncated:
            return as_text(bytes(self.head + self.tail))
        head = without_partial_end(bytes(self.head))
        tail = without_partial_start(bytes(self.tail), len(self.tail) - self.tail_size)
        omitted = self.total_bytes - len(head) - len(tail)
        return f"{as_text(head)}\n[... {omitted} omitted bytes ...]\n{as_text(tail)}"


def as_text(data: bytes) -> str:
    plain = ESCAPE.sub(b"", data).decode("utf-8", "replace")
    return plain.replace("\r\n", "\n").replace("\r", "\n").translate(CONTROL)


def without_partial_end(data: bytes) -> bytes:
    """`data` without an escape sequence or letter that its end cuts in two."""
    data = UNFINISHED_ESCAPE.sub(b"", data)
    for back in range(1, min(4, len(data) + 1)):
        lead = data[-back]
        if lead >= 0xC0:
            length = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return data[:-back] if length > back else data
        if lead < 0x80:
            break
    return data


def without_partial_start(data: bytes, cut: int) -> bytes:
    """`data[cut:]` without the rest of an escape sequence or letter that began before the cut."""
    begin = data.rfind(b"\x1b", max(0, cut - LOOK_BACK), cut)
    if begin >= 0:
        match = ESCAPE.match(data, begin)
        if match is not None and match.end() > cut:
            return data[match.end() :]
    start = cut
    while start < min(len(data), cut + 3) and 0x80 <= data[start] < 0xC0:
        start += 1
    # stray continuation bytes, as in binary output, are no half letter: the byte before the cut tells
    is_inside_letter = start > cut and cut > 0 and data[cut - 1] >= 0x80
    return data[start:] if is_inside_letter else data[cut:]
