"""metrics.jsonl and its W&B copy: nothing lost, nothing blocking."""

import json
import logging
import resource
import time

import pytest

from burnish.policy.training import metrics
from burnish.policy.training.metrics import MetricLogger, MetricsError, WandbMode, read_metrics, resolve_mode


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")


def test_every_value_comes_back(tmp_path, quiet):
    with MetricLogger(tmp_path) as log:
        for step in range(3):
            log.log({"train/loss": 1.0 / (step + 1), "train/bad": float("nan")}, step=step, policy_version=step)
        log.log({"eval/pass": 0.5}, step=0, policy_version=3)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["policy_version"]) for r in records] == [(0, 0), (1, 1), (2, 2), (0, 3)]
    assert records[1]["train/loss"] == 0.5
    assert records[1]["train/bad"] is None
    assert records[3]["eval/pass"] == 0.5


def test_later_steps_are_superseded_by_a_resume(tmp_path, quiet):
    """E02: crash after step 212, resume from checkpoint 200: the second values of 201... win."""
    with MetricLogger(tmp_path) as log:
        for step in range(195, 213):
            log.log({"train/loss": 1.0}, step=step)
    with MetricLogger(tmp_path, resumed_from=200) as log:
        for step in range(201, 215):
            log.log({"train/loss": 2.0}, step=step)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(195, 215))
    assert [r["train/loss"] for r in records] == [1.0] * 6 + [2.0] * 14
    assert '"resumed_from": 200' in (tmp_path / "metrics.jsonl").read_text()


def test_a_torn_last_line_is_dropped_and_a_damaged_one_named(tmp_path, quiet):
    path = tmp_path / "metrics.jsonl"
    with MetricLogger(tmp_path) as log:
        log.log({"train/loss": 0.25}, step=0)
        log.log({"train/loss": 0.5}, step=1)
    path.write_bytes(path.read_bytes()[:-9])
    assert [r["step"] for r in read_metrics(path)] == [0]
    with MetricLogger(tmp_path) as log:
        log.log({"train/loss": 0.75}, step=1)
    assert [r["train/loss"] for r in read_metrics(path)] == [0.25, 0.75]
    path.write_text(path.read_text().replace("0.25", "0.26"))
    with pytest.raises(MetricsError, match="line 1 is damaged"):
        read_metrics(path)


def test_a_metric_without_an_area_is_refused(tmp_path, quiet):
    with MetricLogger(tmp_path) as log, pytest.raises(ValueError, match="'loss' has no area"):
        log.log({"loss": 1.0}, step=0)


def test_online_only_with_a_key(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert resolve_mode(WandbMode.auto) is WandbMode.offline
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert resolve_mode(WandbMode.auto) is WandbMode.online
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert resolve_mode(WandbMode.auto) is WandbMode.offline
    assert resolve_mode(WandbMode.disabled) is WandbMode.disabled


def read_wandb_history(run_dir) -> list[dict]:
    """History records of an offline run: the log's blocks (7-byte header, crc/len/type records) hold protobufs."""
    from wandb.proto import wandb_internal_pb2

    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    data, place, pending, history = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        pending += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record.FromString(pending)
            pending = b""
            if record.WhichOneof("record_type") == "history":
                items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                history.append(items)
    return history


def test_wandb_keeps_every_point_of_areas_whose_steps_interleave(tmp_path, monkeypatch):
    """E02: 3 training and 10 validation points an epoch; a shared step would keep 27 and 98 of them away."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with MetricLogger(tmp_path, config={"lr": 0.1}) as log:
        for epoch in range(10):
            for i in range(3):
                log.log({"train/loss": float(epoch)}, step=3 * epoch + i)
            for i in range(10):
                log.log({"validation/loss": float(i)}, step=10 * epoch + i + 1)
    history = read_wandb_history(tmp_path)
    assert [h["train/step"] for h in history if "train/loss" in h] == list(range(30))
    assert [h["validation/step"] for h in history if "validation/loss" in h] == list(range(1, 101))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 130


class DeadTracker:
    """Stands where the W&B thread stands: hangs, or dies at its first point."""

    def __init__(self, hangs: bool) -> None:
        self.hangs = hangs

    def __call__(self, thread, *args) -> None:
        thread._queue.get()
        if self.hangs:
            time.sleep(60)


@pytest.mark.parametrize("hangs", [True, False])
def test_a_dead_tracker_neither_blocks_nor_kills(tmp_path, monkeypatch, caplog, hangs):
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = DeadTracker(hangs)
    monkeypatch.setattr(metrics._WandbThread, "_run", lambda self, *args: tracker(self))
    monkeypatch.setattr(metrics, "QUEUE_LEN", 5)
    monkeypatch.setattr(metrics, "CLOSE_TIMEOUT_S", 0.1)
    with caplog.at_level(logging.WARNING):
        start = time.monotonic()
        with MetricLogger(tmp_path) as log:
            for step in range(50):
                log.log({"train/loss": 1.0}, step=step)
                time.sleep(0.002)
        assert time.monotonic() - start < 5
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 50
    stopped = [r for r in caplog.records if "W&B has stopped" in r.message]
    assert len(stopped) == 1, "warned once"


def test_a_full_disk_neither_ends_the_training_nor_damages_a_line(tmp_path, quiet, caplog):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricLogger(tmp_path) as log:
        log.log({"train/loss": 1.0}, step=1)
        size = (tmp_path / "metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, before[1]))
        try:
            with caplog.at_level(logging.WARNING):
                log.log({"train/loss": 2.0}, step=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        log.log({"train/loss": 3.0}, step=3)
    assert "cannot write" in caplog.text
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 3]
