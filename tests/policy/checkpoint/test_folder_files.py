"""What lies in run and policy folders: damaged JSON is named, and a folder has one writer."""

import os
import subprocess
import sys

import pytest

from burnish.policy.checkpoint.folder_lock import held
from burnish.policy.checkpoint.json_file import JsonFileError, read_object

DAMAGE = [
    (b"", r"file\.json: not JSON \(line 1"),
    (b'{"a": 1,\n "b"}', r"file\.json: not JSON \(line 2"),
    (b"\xff\xfe", r"file\.json: not UTF-8 \(byte 0\)"),
    (b"[1]", r"file\.json: expected an object of keys and values, got list"),
    (b"[" * 60_000, r"file\.json: not JSON that can be read"),
    (b'{"a": ' + b"1" * 5000 + b"}", r"file\.json: not JSON that can be read"),
    (b'{"b": 1}', r"file\.json: 'a' is missing; start again"),
]


@pytest.mark.parametrize(("content", "sentence"), DAMAGE, ids=range(len(DAMAGE)))
def test_a_damaged_file_is_named(tmp_path, content, sentence):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(JsonFileError, match=sentence):
        read_object(path, "a", advice="start again")


def test_an_object_comes_back(tmp_path):
    (tmp_path / "file.json").write_text('{"a": {"b": 1}}')
    assert read_object(tmp_path / "file.json", "a") == {"a": {"b": 1}}
    with pytest.raises(FileNotFoundError):
        read_object(tmp_path / "other.json")


def test_a_folder_has_one_writer_and_a_dead_one_holds_nothing(tmp_path):
    folder = tmp_path / "new" / "run"
    hold = (
        f"import pathlib, time, burnish.policy.checkpoint.folder_lock as l\nwith l.held(pathlib.Path({str(folder)!r})):"
    )
    hold += "\n print('held', flush=True)\n time.sleep(60)"
    owner = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, env=os.environ)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"held\n"
    with (
        pytest.raises(ValueError, match=r"run is being written by another process; wait for it, stop it"),
        held(folder),
    ):
        raise AssertionError("held twice")
    owner.kill()
    owner.wait()
    owner.stdout.close()
    with held(folder):
        pass
    with held(folder):
        pass
