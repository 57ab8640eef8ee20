"""The SFT loop: the logged loss is the loss, a kill -9 changes nothing, mistakes end in one sentence."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from burnish.policy.checkpoint.released import load_policy
from burnish.policy.encoding.config import EncodingConfig
from burnish.policy.encoding.subvocabulary import tiny_tokenizer
from burnish.policy.training.config import BatchConfig, TrainConfig
from burnish.policy.training.forward import score
from burnish.policy.training.metrics import read_metrics
from burnish.policy.training.step import TrainStep
from burnish.sft.config import DataConfig
from burnish.sft.data import load, loss_tokens, micro_batches
from burnish.sft.loss import mean_nll, nll


def command(runs: Path, policy: Path, data: Path, *overrides: str) -> list[str]:
    settings = ["epochs=2", "batch.batch_size=4", "train.warmup_steps=2", "checkpoint_every=1", "wandb=disabled"]
    where = [f"policy={policy}", f"data.path={data}", f"runs={runs}"]
    return [sys.executable, "-m", "burnish.configs.cli", "sft", *where, *settings, *overrides]


ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def test_logged_loss_equals_the_eval_loss_for_any_micro_batches(tiny_policy, oracle_file):
    """rl.md row 12: the shown loss was one micro-batch's share."""
    config = DataConfig(path=str(oracle_file))
    dataset, _ = load(oracle_file, config, tiny_tokenizer(), EncodingConfig())
    updates = []
    for batch in (
        BatchConfig(batch_size=8),
        BatchConfig(batch_size=8, micro_batch_size=2),
        BatchConfig(batch_size=8, micro_batch_size=4),
    ):
        batches = micro_batches(dataset, range(8), batch)
        model = load_policy(tiny_policy)
        expected = mean_nll(model, batches)
        trainer = TrainStep(model, TrainConfig(lr=1e-3, eps=1e-3), forward=score)
        metrics = trainer.step(batches, nll, denominator=loss_tokens(batches))
        assert metrics["train/loss"] == pytest.approx(expected, rel=1e-6)
        updates.append((metrics["train/grad_norm"], model.head.weight.detach().clone()))
    for norm, head in updates[1:]:
        assert norm == pytest.approx(updates[0][0], rel=1e-5)
        torch.testing.assert_close(head, updates[0][1], rtol=1e-5, atol=1e-7)


def test_kill_minus_nine_and_the_same_command_again_equals_the_uninterrupted_run(tmp_path, tiny_policy, oracle_file):
    whole = command(tmp_path / "whole", tiny_policy, oracle_file)
    done = subprocess.run(whole, capture_output=True, text=True, env=ENV, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    broken = command(tmp_path / "broken", tiny_policy, oracle_file)
    checkpoints = tmp_path / "broken" / "sft" / "checkpoints"
    victim = subprocess.Popen(broken, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENV)
    deadline = time.monotonic() + 200
    while not list(checkpoints.glob("step-[3-9]")) and time.monotonic() < deadline:
        assert victim.poll() is None, "ended before it could be killed"
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert not (tmp_path / "broken" / "sft" / "policy").exists()
    again = subprocess.run(broken, capture_output=True, text=True, env=ENV, timeout=300)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "Resumed training state" in again.stderr
    first, second = (tmp_path / name / "sft" for name in ("whole", "broken"))
    weights, resumed = (load_file(run / "policy" / "model.safetensors") for run in (first, second))
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    losses = [
        [(r["step"], r["train/loss"], r["train/grad_norm"], r["train/lr"]) for r in read_metrics(run / "metrics.jsonl")]
        for run in (first, second)
    ]
    assert len(losses[0]) == 10
    assert losses[0] == losses[1]
    assert losses[0][-1][1] < losses[0][0][1], "nothing was learnt"
    lineage = json.loads((first / "policy" / "burnish.json").read_text())
    assert lineage["stage"] == "sft"
    assert set(lineage["parents"]) == {"policy", "data"}
    finished = subprocess.run(whole, capture_output=True, text=True, env=ENV, timeout=300)
    assert (finished.returncode, "done already" in finished.stderr) == (0, True)
    other = subprocess.run([*whole, "train.lr=1e-4"], capture_output=True, text=True, env=ENV, timeout=300)
    assert other.returncode == 2
    assert "holds another run (config.yaml differs)" in other.stderr


def test_a_run_that_stops_at_a_loss_decays_from_there_and_resumes_to_the_same_end(tmp_path, tiny_policy, oracle_file):
    stop = ["stop_at_loss=100", "validate_every=3", "train.decay_steps=4", "data.validation_limit=4"]
    words = command(tmp_path, tiny_policy, oracle_file, f"data.validation_path={oracle_file}", *stop)
    victim = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENV)
    deadline = time.monotonic() + 200
    while not list((tmp_path / "sft" / "checkpoints").glob("step-[4-9]")) and time.monotonic() < deadline:
        assert victim.poll() is None, "ended before it could be killed"
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    again = subprocess.run(words, capture_output=True, text=True, env=ENV, timeout=300)
    assert again.returncode == 0, again.stderr[-2000:]
    records = read_metrics(tmp_path / "sft" / "metrics.jsonl")
    assert [r["step"] for r in records if "train/loss" in r] == list(range(1, 8))
    rates = [r["train/lr"] for r in records]
    assert rates[2] > rates[3] > rates[4] > rates[5] > rates[6] >= 0
    assert [r["step"] for r in records if "train/validation_loss" in r] == [3, 6]


def test_a_malformed_line_ends_in_exit_code_two_and_a_sentence(tmp_path, tiny_policy, oracle_file):
    data = tmp_path / "bad.jsonl"
    data.write_text(oracle_file.read_text() + '{"messages": [{"role": "user"\n')
    done = subprocess.run(
        command(tmp_path / "runs", tiny_policy, data), capture_output=True, text=True, env=ENV, timeout=300
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith(f"burnish sft: {data} line 21: not JSON")
    assert not (tmp_path / "runs" / "sft" / "checkpoints").exists()
