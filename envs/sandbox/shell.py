r"""The protocol of the persistent shell, over any byte stream to a bash: commands in, output and status out.

The shell reads NUL-terminated pairs (nonce, command) from a copy of its stdin, evaluates the command with an empty stdin, and
writes `\x1e nonce live|gone status pid directory processes \x1e`, each field ended by `\x1f`, to a copy of its stdout. The nonce is fresh
for each command and the frame holds control characters that the protocol's own text spells as escapes, so neither output
that looks like a frame nor `set -x` ends a command early. A background child that keeps stdout open does not matter: the frame ends the command, not
the end of the stream. The directory and the processes alive at that point let the sandbox replace the shell and spare
older background work when a command runs over its time limit.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from burnish.envs.sandbox.base import ExecResult
from burnish.envs.sandbox.capture import Capture

# one line, so that messages of bash count the command's own lines. `read` and `printf` are builtins: no process is made.
# Its own trace (`set -x`) goes to /dev/null. $? of the previous command is restored before the next one.
BOOT = (
    "exec 2>&1 200<&0 201>&1 0</dev/null; "
    '__burnish_return() { return "$1"; }; '
    '__burnish_report() { builtin printf \'%s\\037\' $\'\\036\'"$__burnish_nonce" "$@" "$$" '
    "\"${PWD//[[:cntrl:]]/?}\" /proc/[0-9]* $'\\036' >&201; }; "
    "trap '{ __burnish_report gone \"$?\"; } 2>/dev/null' EXIT; __burnish_status=0; "
    "while { IFS= builtin read -r -d '' -u 200 __burnish_nonce && IFS= builtin read -r -d '' -u 200; } 2>/dev/null; do "
    '{ __burnish_return "$__burnish_status"; } 2>/dev/null; eval "$REPLY"; '
    '{ __burnish_status=$?; __burnish_report live "$__burnish_status"; } 2>/dev/null; done'
)
ARGV = ("bash", "--noprofile", "--norc", "-c", BOOT)
FRAME_MAX = 32_768
"""Bytes of one frame at most; as many are held back while looking for its end."""
POLL_S = 1.0
SEPARATOR, END = b"\x1f", b"\x1e\x1f"


class Channel(Protocol):
    """A byte stream to and from one bash process."""

    def send(self, data: bytes, timeout_s: float) -> None:
        """Raises:
        OSError: the process no longer reads (BrokenPipeError), or took too long (TimeoutError).
        """
        ...

    def receive(self, timeout_s: float) -> bytes | None:
        """The next bytes; empty at the end of the stream, None when nothing came in time."""
        ...

    def ended(self) -> bool:
        """True when the process is gone, even if its children still hold the stream."""
        ...

    def exit_code(self) -> int | None:
        """Of a process that is gone."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What the shell reports when a command has ended."""

    is_gone: bool
    """The shell itself has ended (`exit`): the next command needs another one."""
    status: int
    shell_pid: int
    processes: frozenset[int]
    directory: str


def quote(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


@dataclass(frozen=True, kw_only=True)
class ShellReply:
    """`frame` is None when the command did not end: time limit, or the shell itself is gone (`ended`)."""

    capture: Capture
    frame: Frame | None
    ended: bool
    duration_s: float


def result(
    reply: ShellReply, exit_code: int | None, timed_out: bool = False, rewrite: Callable[[str], str] | None = None
) -> ExecResult:
    """What the agent is told of a command; `rewrite` is applied to the kept output."""
    output = reply.capture.text()
    return ExecResult(
        output=rewrite(output) if rewrite else output,
        exit_code=exit_code,
        timed_out=timed_out,
        truncated=reply.capture.truncated,
        total_bytes=reply.capture.total_bytes,
        duration_s=reply.duration_s,
        shell_restarted=reply.frame is None or reply.frame.is_gone,
    )


class Shell:
    """One running bash behind a channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.frame: Frame | None = None
        """The latest one; None before the first command has ended."""
        self.early = b""
        """Written by background work after the latest command had ended; as on a terminal, the next command shows it."""

    def run(self, command: str, timeout_s: float, cap: int) -> ShellReply:
        """Runs one command; leaves killing to the caller when `frame` comes back as None."""
        started = time.monotonic()
        deadline = started + timeout_s
        capture = Capture(cap)
        nonce = secrets.token_hex(12)
        # bash drops NUL bytes in a script as well
        text = command.replace("\0", "").encode("utf-8", "replace")
        reader = FrameReader(nonce.encode(), capture)
        reader.feed(self.early)
        ended = False
        try:
            self.channel.send(nonce.encode() + b"\0" + text + b"\0", timeout_s)
        except TimeoutError:
            return ShellReply(capture=capture, frame=None, ended=False, duration_s=time.monotonic() - started)
        except OSError:
            ended = True
        while not ended and reader.frame is None:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            chunk = self.channel.receive(min(left, POLL_S))
            if chunk:
                reader.feed(chunk)
            elif chunk == b"" or self.channel.ended():
                ended = True
                self.drain(reader)
        self.early = reader.finish()
        if reader.frame is not None:
            self.frame = reader.frame
        return ShellReply(
            capture=capture,
            frame=reader.frame,
            ended=ended and reader.frame is None,
            duration_s=time.monotonic() - started,
        )

    def drain(self, reader: "FrameReader") -> None:
        """Takes what is still in the stream of a shell that is gone, but not what its children go on writing."""
        until = time.monotonic() + POLL_S
        while time.monotonic() < until and (chunk := self.channel.receive(0.05)):
            reader.feed(chunk)


class FrameReader:
    """Passes a stream on to a capture, up to the frame with one nonce."""

    def __init__(self, nonce: bytes, capture: Capture) -> None:
        self.start = b"\x1e" + nonce + SEPARATOR
        self.capture = capture
        self.held = bytearray()
        self.frame: Frame | None = None

    def feed(self, chunk: bytes) -> None:
        self.held += chunk
        while self.frame is None:
            begin = self.held.find(self.start)
            # without a start, the last bytes stay: the end of a chunk may cut one in two
            self.pass_on(begin if begin >= 0 else len(self.held) - len(self.start) + 1)
            if begin < 0:
                return
            end = self.held.find(END, len(self.start))
            if end < 0 and len(self.held) <= FRAME_MAX:
                return
            if end >= 0:
                self.frame = parse_frame(bytes(self.held[len(self.start) : end]))
            if self.frame is None:
                # something else wrote into it, so it is output
                self.pass_on(len(self.start))
            else:
                del self.held[: end + len(END)]

    def pass_on(self, size: int) -> None:
        if size > 0:
            self.capture.feed(bytes(self.held[:size]))
            del self.held[:size]

    def finish(self) -> bytes:
        """Ends the stream: what came after the frame; without a frame, what was held back was output after all."""
        if self.frame is None:
            self.pass_on(len(self.held))
        return bytes(self.held)


def parse_frame(body: bytes) -> Frame | None:
    """None when it is not what the shell writes."""
    try:
        state, status, shell_pid, directory, *processes = body.rstrip(SEPARATOR).split(SEPARATOR)
        return Frame(
            is_gone=state == b"gone",
            status=int(status),
            shell_pid=int(shell_pid),
            # `set -f` leaves the pattern as it is: then no process is known
            processes=frozenset(int(name.removeprefix(b"/proc/")) for name in processes if b"*" not in name),
            directory=directory.decode("utf-8", "surrogateescape"),
        )
    except ValueError:
        return None
