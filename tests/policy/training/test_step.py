"""The train step: one denominator over micro-batches, ranks and ZeRO stages; bad steps skipped; exact resume."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from burnish.policy.training.config import TrainConfig
from burnish.policy.training.distributed import shutdown
from burnish.policy.training.resume import CheckpointError
from burnish.policy.training.step import LossSum, TrainStep, reduce_metrics


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def squared_error(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> LossSum:
    errors = (output - batch[1]).square()
    return LossSum(loss=errors.sum(), metrics={"train/abs": (errors.detach().sqrt().sum(), errors.numel())})


def make_trainer(stage: int = 1, **settings) -> TrainStep:
    config = TrainConfig(zero_stage=stage, **({"lr": 1e-2, "grad_clip": 0.5} | settings))
    return TrainStep(make_model(), config, forward=lambda model, batch: model(batch[0]))


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, 4), torch.randn(16, 1)


def split(batch: tuple[torch.Tensor, torch.Tensor], sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(batch[0].split(sizes), batch[1].split(sizes), strict=True))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_micro_batches_do_not_change_the_step(stage):
    results = []
    for sizes in ([16], [7, 9], [1, 2, 5, 8]):
        trainer = make_trainer(stage)
        metrics = trainer.step(split(make_batch(), sizes), squared_error, denominator=16)
        results.append((metrics, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])))
    plain = make_model()
    x, y = make_batch()
    loss = (plain(x) - y).square().mean()
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm().item()
    for metrics, weights in results:
        assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-6)
        torch.testing.assert_close(weights, results[0][1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_matches_plain_adamw_with_clipping(stage):
    trainer, plain = make_trainer(stage), make_model()
    decay = {"params": [plain[0].weight, plain[2].weight], "weight_decay": 0.1}
    offsets = {"params": [plain[0].bias, plain[2].bias], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([decay, offsets], lr=1e-2, betas=(0.9, 0.95), eps=1e-20)
    x, y = make_batch()
    for _ in range(3):
        trainer.step(split((x, y), [4, 12]), squared_error, denominator=16)
        optimizer.zero_grad()
        (plain(x) - y).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    for got, want in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(stage):
    trainer, reference = make_trainer(stage), make_trainer(stage)
    x, y = make_batch()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    metrics = trainer.step([(x, y), (x * math.nan, y)], squared_error, denominator=32)
    assert all(torch.equal(b, p) for b, p in zip(before, trainer.model.parameters(), strict=True))
    assert (metrics["train/step_skipped"], metrics["train/skipped_steps"], trainer.num_steps) == (1, 1, 0)
    assert not math.isfinite(metrics["train/grad_norm"])
    # an overflow of the gradient alone, with a finite loss
    metrics = trainer.step(
        [(x, y)], lambda out, batch: LossSum(loss=((out - out.detach()) * 1e38 * 1e38).sum()), denominator=1
    )
    assert metrics["train/skipped_steps"] == 2
    after = trainer.step([(x, y)], squared_error, denominator=16)
    untouched = reference.step([(x, y)], squared_error, denominator=16)
    assert after["train/loss"] == untouched["train/loss"]
    for got, want in zip(trainer.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(got, want)


def test_a_step_without_loss_tokens_is_refused():
    with pytest.raises(ValueError, match="no loss tokens"):
        make_trainer().step([make_batch()], squared_error, denominator=0)


def test_metrics_are_weighted_once():
    assert reduce_metrics([{"m": (2.0, 1.0)}, {"m": (0.0, 9.0)}, {"empty": (0.0, 0.0)}]) == {"m": 0.2}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_resume_equals_the_uninterrupted_run_bitwise(stage, tmp_path):
    settings = {"total_steps": 6, "warmup_steps": 2, "decay_steps": 2}

    def steps(trainer: TrainStep, count: int) -> list[dict[str, float]]:
        found = []
        for _ in range(count):
            batch = torch.randn(8, 4), torch.randn(8, 1)  # drawn: the random state must come back too
            found.append(trainer.step([batch], squared_error, denominator=8))
        return found

    whole = make_trainer(stage, **settings)
    torch.manual_seed(3)
    expected = steps(whole, 3)
    whole.save(tmp_path, extra={"cursor": [1, 2]})
    expected += steps(whole, 3)
    torch.manual_seed(99)
    resumed = make_trainer(stage, **settings)
    assert resumed.load(tmp_path) == {"cursor": [1, 2]}
    assert resumed.num_steps == 3
    assert steps(resumed, 3) == expected[3:]
    for got, want in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(got, want)


def test_another_zero_stage_is_refused_by_name(tmp_path):
    make_trainer(1).save(tmp_path)
    with pytest.raises(CheckpointError, match="zero_stage=1, this run has zero_stage=2"):
        make_trainer(2).load(tmp_path)


def test_two_ranks_through_gloo(tmp_path):
    """rl.md row 1: rank A token losses [1,1,1,1], rank B [3] have the gradient 1.4, at every ZeRO stage."""
    worker = Path(__file__).with_name("ranks_worker.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        str(worker),
        str(tmp_path),
    ]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | {
        "OMP_NUM_THREADS": "1"
    }
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        output, _ = launcher.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        launcher.terminate()  # torchrun passes it on to the ranks; a kill would orphan them
        raise
    assert launcher.returncode == 0, output[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    for stage in (0, 1, 2):
        for case in ("row 1", "uneven", "nothing on rank 1"):
            got = results[f"{case} zero {stage}"]
            assert got["train/grad_norm"] == pytest.approx(1.4, rel=1e-6), (case, stage)
            assert got["weight"] == pytest.approx(1 - 1.4 / 2.4, rel=1e-6), (case, stage)
            assert got["mean"] == pytest.approx(1.4)
            assert got["unused"] == 1.0
        bad = results[f"not finite on rank 1 zero {stage}"]
        assert (bad["weight"], bad["train/step_skipped"]) == (1.0, 1.0)
    assert results["resume"] == {"is_same": True, "extra": {"cursor": 7}}


def test_a_trainer_can_be_made_after_the_group_was_left():
    """One process trains twice: DeepSpeed keeps copies of the first group, which must go with it."""
    losses = []
    for stage in (1, 0, 2):
        trainer = make_trainer(stage)
        losses.append(trainer.step([make_batch()], squared_error, denominator=16)["train/loss"])
        shutdown()
        assert not torch.distributed.is_initialized()
    assert losses == losses[:1] * 3
