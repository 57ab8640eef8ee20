"""What the system refuses ends in exit code 2 and one sentence; what is ours keeps its traceback."""

import errno
import os
import sqlite3
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError

from burnish.configs.cli import main
from burnish.configs.refusals import ADVICE, sentence_of


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "/a/b"),
            "/a/b: no such file or directory; check",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/a"), "/a: permission denied; give a path that this user"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", b"/a"), "/a: is a directory; a file is expected there"),
        (OSError(errno.ENOSPC, "No space left on device"), "no space left on device; free some space"),
        (OSError(errno.EROFS, "Read-only file system", "/a"), "/a: read-only file system; give a path that can be"),
        (FileNotFoundError("no data file at x"), "no data file at x"),
        (ValueError("a\nb"), "a b"),
        (
            sqlite3.OperationalError("database or disk is full"),
            "the disk is full (database or disk is full); free some",
        ),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "the disk is full (I/O error: No space"),
        (
            RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
            "the disk is full (Pytorch",
        ),
        (
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 6 vs 4"),
            "the disk is full ([enforce",
        ),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 4096 bytes"), "not enough memory (DefaultCPUAlloc"),
        (ExceptionGroup("tasks", [ValueError("the first"), ValueError("the second")]), "the first"),
        (KeyError("ours"), None),
        (RuntimeError("ours"), None),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), None),
        (ExceptionGroup("tasks", [ValueError("theirs"), KeyError("ours")]), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_the_users_or_ours(error, says):
    sentence = sentence_of(error)
    if says is None:
        assert sentence is None
        return
    assert sentence is not None
    assert sentence.startswith(says)
    assert "\n" not in sentence


def test_a_full_disk_behind_another_error_is_still_a_full_disk():
    error = RuntimeError("the checkpoint was not written")
    error.__cause__ = SafetensorError("No space left on device")
    assert "the disk is full" in str(sentence_of(error))


def test_every_advice_is_for_an_error_that_this_system_has():
    assert all(os.strerror(number) for number in ADVICE)


@pytest.mark.parametrize(
    "words",
    [
        ["synth", "out={file}/tasks", "sandbox=local"],
        ["eval", "tasks={tasks}", "agent=nop", "sandbox=local", "out={file}"],
        ["quickstart", "runs={file}"],
        ["audit", "{file}"],
    ],
)
def test_a_file_where_a_folder_is_due_is_one_sentence(words, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("mine")
    tasks = Path(__file__).parents[1] / "envs" / "tasks"
    assert main([word.format(file=file, tasks=tasks) for word in words]) == 2
    complaint = capsys.readouterr().err.strip().splitlines()[-1]
    assert complaint.startswith(f"burnish {words[0]}: {file}")
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["synth", "out="], "out must not be empty: give out=..."),
        (["eval", "tasks=''", "agent=oracle"], "tasks must not be empty"),
        (["sft", "data.path=", "policy=p"], "data.path must not be empty"),
        (["audit", "run="], "run must not be empty"),
    ],
)
def test_an_empty_path_is_not_this_folder(words, says, capsys):
    assert main(words) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sft", "data.path=a", "policy=b", "name=.."], "name must be a folder name"),
        (["rl", "tasks=a", "policy=b", "name=.."], "name must be a folder name"),
        (["quickstart", "name=."], "name must be a folder name"),
        (["synth", "out=a", "domain=math"], "domain: expected terminal|coding, got 'math'"),
        (["quickstart", "sft.name=other"], "sft.runs and sft.name are the pipeline's own"),
        (["quickstart", "rl.runs=elsewhere"], "rl.runs and rl.name are the pipeline's own"),
        (["sft", "data.path=a", "policy=b", "train.lr=inf"], "train.lr is out of range: got inf"),
        (["sft", "data.path=a", "policy=b", "threads=1e9"], "threads must be 0 to 1024"),
        (["init", "seed=1e30"], "seed: expected integer, got '1e30'"),
        (["eval", "tasks=a", "agent=nop", "seed=-1"], "seed must be >= 0, got -1"),
        (["eval", "tasks=a", "agent=nop", "engine.reserved_ids=[1e30]"], "engine.reserved_ids[0]: expected integer"),
    ],
)
def test_a_setting_that_nothing_could_run_with_is_named(words, says, capsys):
    assert main([*words, "--dry-run"]) == 2
    assert says in capsys.readouterr().err


def test_help_of_the_largest_verb_is_quick(capsys):
    started = time.process_time()
    assert main(["quickstart", "--help"]) == 0
    assert time.process_time() - started < 2.0
    assert "sft.data.path" in capsys.readouterr().out
