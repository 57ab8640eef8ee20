"""The persistent shell on both kinds of sandbox: state, odd commands, time limits that leave no process behind."""

import resource
import time
from collections.abc import Iterator

import pytest

from burnish.envs.sandbox.base import ExecResult, Sandbox
from burnish.envs.sandbox.shell import Frame, FrameReader
from burnish.envs.task import load_task


@pytest.fixture
def sandbox(sandboxes, make_task) -> Iterator[Sandbox]:
    made = sandboxes.create(load_task(make_task()), role="agent", run_id="test-shell", attempt_id="a1")
    yield made
    made.close()


def test_directory_variables_functions_and_status_survive(sandbox):
    assert sandbox.run("cat note.txt; pwd", 10).output == "a note\n/app\n"
    sandbox.run("cd /tmp; x=5; declare -A m; m[k]=v; f() { echo f-$1; }; alias_free=1; false", 10)
    assert sandbox.run("echo $? $PWD $x ${m[k]} $(f 1)", 10).output == "1 /tmp 5 v f-1\n"


def test_stdout_and_stderr_come_in_the_order_written(sandbox):
    done = sandbox.run("echo one; echo two >&2; echo three; nosuch; exit_code() { return 7; }; exit_code", 10)
    assert done.output == "one\ntwo\nthree\nbash: line 1: nosuch: command not found\n"
    assert done.exit_code == 7


@pytest.mark.parametrize(
    ("command", "output", "code"),
    [
        ("printf 'no newline'", "no newline", 0),
        ("", "", 0),
        ("cat; read line; echo got:$line", "got:\n", 0),
        ("python3 -c 'import sys; print(repr(sys.stdin.read()))'", "''\n", 0),
        ("echo a\0b", "ab\n", 0),
        ("cat <<END\none\n  two\nEND", "one\n  two\n", 0),
        ("(exit 124)", "", 124),
        ("bash -c 'kill -9 $$' 2>/dev/null", None, 137),
        ("printf '\\036%s' ready; printf '\\037\\036\\037'", "ready", 0),
        # what the protocol itself could print: its own variables, its trace
        ("printf '\\036%s\\037live\\0370\\037' \"${__burnish_nonce%?}\"", None, 0),
        ("set -x; echo hi; set +x", "++ echo hi\nhi\n++ set +x\n", 0),
        ("set -f; echo [a]*; set +f", "[a]*\n", 0),
        ("IFS=:; echo a:b", "a:b\n", 0),
        ("trap 'echo bye' EXIT; trap - EXIT", "", 0),
    ],
)
def test_odd_commands_end_when_they_end(sandbox, command, output, code):
    done = sandbox.run(command, 10)
    assert (done.exit_code, done.timed_out, done.shell_restarted) == (code, False, False)
    if output is not None:
        assert done.output == output
    assert sandbox.run("unset IFS; echo next", 10).output == "next\n"


def test_a_syntax_error_is_told_and_costs_nothing_else(sandbox):
    done = sandbox.run('echo "unterminated', 10)
    assert done.exit_code == 2
    assert "unexpected EOF" in done.output
    assert sandbox.run("echo next", 10).output == "next\n"


def test_a_long_command_arrives_whole(sandbox):
    text = "abcdefghij" * 20_000
    done = sandbox.run(f"x='{text}'; echo ${{#x}} ${{x: -3}}", 20)
    assert done.output == "200000 hij\n"


def test_binary_output_does_not_end_the_episode(sandbox):
    # C-21
    done = sandbox.run(r"printf '\xff\xfe\x00\xed\xa0\x80'; head -c 100000 /dev/urandom", 20)
    assert (done.exit_code, done.total_bytes, done.truncated) == (0, 100_006, True)
    assert sandbox.run("echo next", 10).output == "next\n"


def test_a_flood_costs_no_memory_and_is_counted(sandbox):
    # F01
    sandbox.run("yes | head -c 100000", 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = sandbox.run("yes | head -c 10000000; (exit 3)", 60)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert (done.total_bytes, done.exit_code, done.truncated) == (10_000_000, 3, True)
    assert len(done.output) < 10_100
    assert "omitted" in done.output
    assert grown_kib < 4096, f"{grown_kib} KiB"


def test_a_background_child_that_holds_stdout_does_not_hold_the_answer(sandbox):
    # C-11
    done = sandbox.run("(sleep 600 &) ; echo hi", 10)
    assert done.output == "hi\n"
    assert done.duration_s < 2
    # and what background work says later is shown by the next command, as on a terminal
    sandbox.run("(sleep 0.2; echo late) &", 10)
    assert sandbox.run("sleep 0.6; echo now", 10).output == "late\nnow\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [("echo bye; exit 3", 3), ("set -e; false; echo not-reached", 1), ("exec true", 0), ("kill -9 $$", 137)],
)
def test_a_shell_that_ends_is_replaced_in_the_same_directory(sandbox, command, code):
    sandbox.run("cd /tmp; touch here", 10)
    done = sandbox.run(command, 10)
    assert (done.exit_code, done.timed_out, done.shell_restarted) == (code, False, True)
    assert "not-reached" not in done.output
    after = sandbox.run("pwd; ls", 10)
    assert (after.output, after.shell_restarted) == ("/tmp\nhere\n", False)


def test_exit_answers_at_once_although_a_child_holds_stdout(sandbox):
    done = sandbox.run("sleep 600 & exit 5", 20)
    assert (done.exit_code, done.duration_s < 2) == (5, True)


def left_over(sandbox: Sandbox, name: str) -> str:
    # the bracket keeps the search from finding itself; a zombie is not running
    return sandbox.run(f"ps -eo stat,args | grep -v '^Z' | grep '[{name[0]}]{name[1:]}' | grep -v grep", 10).output


@pytest.mark.parametrize(
    "command",
    [
        "sleep 54321",
        "sleep 54321; touch /app/PROOF",
        "(sleep 54321; touch /app/PROOF)",
        "sleep 54321 || touch /app/PROOF",
        "setsid sleep 54321 & wait",
        "(setsid bash -c 'sleep 54321; touch /app/PROOF' >/dev/null 2>&1 &); sleep 54321",
        "trap '' TERM INT HUP; bash -c 'trap \"\" TERM INT HUP; sleep 54321; sleep 54321'",
        "while :; do :; done",
        "for i in 1 2 3; do sleep 54321; done; touch /app/PROOF",
        "cat /dev/zero",
    ],
)
def test_after_the_time_limit_nothing_of_the_command_runs(sandbox, command):
    # F05, C-09, C-10
    sandbox.run("cd /tmp; echo kept > /app/state", 10)
    started = time.monotonic()
    done = sandbox.run(command, 0.7)
    # the limit, and a second for what it takes to end the tree on a busy machine
    assert time.monotonic() - started < 8
    assert (done.exit_code, done.timed_out, done.shell_restarted) == (None, True, True)
    assert left_over(sandbox, "sleep 54321") == ""
    assert sandbox.run("cat /app/state; ls /app/PROOF 2>/dev/null; pwd", 10).output == "kept\n/tmp\n"


def test_older_background_work_survives_a_later_time_limit(sandbox):
    sandbox.run("sleep 43210 & disown; (while :; do sleep 0.1; done) &", 10)
    assert sandbox.run("sleep 54321", 0.5).timed_out
    assert left_over(sandbox, "sleep 43210").count("sleep 43210") == 1
    assert left_over(sandbox, "sleep 54321") == ""


def test_codes_124_and_137_are_told_apart_from_a_time_limit(sandbox):
    # F05: programs that end with these codes by themselves
    for command, code in [("bash -c 'exit 124'", 124), ("bash -c 'kill -9 $$'", 137), ("timeout 0.1 sleep 5", 124)]:
        done = sandbox.run(command, 10)
        assert (done.exit_code, done.timed_out) == (code, False), command


def test_files_go_in_and_only_regular_files_come_out(sandbox, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("echo ran\n")
    script.chmod(0o755)
    sandbox.put_files({"in/data.bin": b"\0\xff", "run.sh": script}, "/app")
    assert sandbox.run("./run.sh; od -An -tx1 in/data.bin", 10).output == "ran\n 00 ff\n"
    sandbox.run("ln -s /etc/passwd link; mkfifo pipe; mkdir -p sub/empty; chmod 6755 run.sh; ln -s / root", 10)
    found = sandbox.get_artifacts(["/app", "/nowhere", "/app/root/etc/hosts", "/app/link"])
    assert {file.path for file in found.files} >= {"/app/note.txt", "/app/in/data.bin", "/app/run.sh"}
    assert {"/app/link", "/app/pipe", "/app/root"} <= {path for path, _ in found.rejected}
    assert "/nowhere" in found.missing
    assert "/app/sub/empty" in found.directories
    run = found.file("/app/run.sh")
    assert run is not None
    assert run.mode == 0o755
    for name in ("../x", "/abs", "a/../../b"):
        with pytest.raises(ValueError, match="not a relative path"):
            sandbox.put_files({name: b""}, "/app")


def test_closing_twice_is_fine_and_a_closed_sandbox_says_so(sandboxes, make_task):
    made = sandboxes.create(load_task(make_task()), role="agent", run_id="test-shell", attempt_id="a1")
    assert made.alive()
    made.close()
    made.close()
    assert not made.alive()
    with pytest.raises(RuntimeError, match="closed"):
        made.run("true", 1)


class Sink:
    def __init__(self) -> None:
        self.data = b""

    def feed(self, chunk: bytes) -> None:
        self.data += chunk


@pytest.mark.parametrize("chunk", [1, 2, 5, 1000])
def test_a_frame_is_found_wherever_the_stream_is_cut(chunk):
    stream = b"out\x1enonceX\x1fput\x1enonce\x1flive\x1f3\x1f77\x1f/a b\x1f/proc/1\x1f/proc/77\x1f\x1e\x1flater"
    sink = Sink()
    reader = FrameReader(b"nonce", sink)  # pyright: ignore[reportArgumentType]
    for start in range(0, len(stream), chunk):
        reader.feed(stream[start : start + chunk])
    frame = Frame(is_gone=False, status=3, shell_pid=77, processes=frozenset({1, 77}), directory="/a b")
    assert reader.frame == frame
    assert (sink.data, reader.finish()) == (b"out\x1enonceX\x1fput", b"later")


def test_a_spoilt_frame_is_output(sandbox):
    sink = Sink()
    reader = FrameReader(b"n", sink)  # pyright: ignore[reportArgumentType]
    reader.feed(b"\x1en\x1fnonsense\x1e\x1f")
    assert reader.frame is None
    reader.finish()
    assert sink.data == b"\x1en\x1fnonsense\x1e\x1f"
    assert isinstance(sandbox.run("true", 5), ExecResult)
