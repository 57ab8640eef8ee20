"""Training states: a kill -9 at any instant leaves a loadable one; damage is found and named."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from burnish.policy.training.resume import CheckpointError, CheckpointStore


def write_state(store: CheckpointStore, step: int) -> Path:
    folder = store.begin(step)
    for name in ("a.bin", "b.bin", "deep/c.bin"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(step.to_bytes(4, "little") * 20_000)
    return store.commit(step, {"num_steps": step})


def test_keeps_the_last_states_and_checks_them(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    assert store.latest() is None
    for step in (1, 2, 10):
        write_state(store, step)
    assert [p.name for p in store.states()] == ["step-2", "step-10"]
    assert store.verify(store.latest(), num_steps=10)["num_steps"] == 10
    assert not list(tmp_path.glob(".*"))


def test_the_same_step_can_be_written_again(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    write_state(store, 3)
    write_state(store, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["step-3"]


@pytest.mark.parametrize("name", ["a.bin", "deep/c.bin", "state.json"])
def test_a_damaged_file_is_named_with_the_older_state(tmp_path, name):
    store = CheckpointStore(tmp_path, keep=2)
    write_state(store, 1)
    folder = write_state(store, 2)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is damaged.*resume from step-1"):
        store.verify(folder)


def test_a_missing_file_is_named(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    folder = write_state(store, 2)
    (folder / "b.bin").unlink()
    with pytest.raises(CheckpointError, match=r"b\.bin is missing; no older state"):
        store.verify(folder)


def test_kill_minus_nine_at_fifty_points_always_leaves_a_loadable_state(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    started = time.monotonic()
    for step in (1, 2, 3):
        write_state(store, step)
    # kills are spread over the time that a few writes take here and now, whatever else the machine does
    longest_s = 4 * (time.monotonic() - started) / 3
    chance = random.Random(7)
    for _ in range(50):
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tell, b".")
            for n in range(100):  # the same step twice now and then: the replacing rename is a point of its own
                write_state(store, step + 1 + n // 2)
            os._exit(0)
        os.read(ready, 1)
        time.sleep(chance.uniform(0.0, longest_s))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)
        latest = CheckpointStore(tmp_path, keep=1).latest()
        assert latest is not None
        facts = store.verify(latest)
        assert facts["num_steps"] >= step, "went backwards"
        step = facts["num_steps"]
    assert step > 10, "the children were killed before they wrote anything"
