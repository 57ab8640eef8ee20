"""Several ranks of one verb: a mistake inside them stays a user's mistake, said once; what is killed leaves nobody behind."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from burnish.configs import cli

SFT = ["sft", "batch.num_ranks=2", "batch.batch_size=4"]


def start(args: list[str], cwd: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "burnish.configs.cli", *args]
    return subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, text=True)


def test_a_mistake_found_in_the_ranks_exits_with_2_and_one_sentence(tiny_policy, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"messages": [\n')
    process = start([*SFT, f"policy={tiny_policy}", "data.path=data.jsonl"], tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2, errors
    assert [line for line in errors.splitlines() if line.startswith("burnish sft:")] == [
        line for line in errors.splitlines() if "data.jsonl" in line and "line 1" in line
    ]
    assert errors.count("burnish sft:") == 1
    assert "Traceback" not in errors


def test_ranks_die_with_a_launcher_that_is_killed(tiny_policy, tmp_path):
    turn = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "data.jsonl").write_text(f"{json.dumps(turn)}\n" * 4)
    process = start([*SFT, f"policy={tiny_policy}", "data.path=data.jsonl", "epochs=100000"], tmp_path)
    try:
        ranks = wait_for(lambda: children(process.pid) if len(children(process.pid)) == 2 else None)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))


def test_another_number_of_processes_is_refused(tiny_policy, tmp_path, monkeypatch, capsys):
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "data.jsonl").write_text("")
    assert cli.main([*SFT, f"policy={tiny_policy}", f"data.path={tmp_path / 'data.jsonl'}"]) == 2
    assert "batch.num_ranks=2, but 1 processes were started" in capsys.readouterr().err


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def wait_for(condition, seconds: float = 60.0):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return result
