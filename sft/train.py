"""burnish sft: the whole loop. Data, model, one optimizer step a batch, exact resume, a policy folder at the end.

The same command goes on where an interrupted one stopped, and does nothing when all is done. On several ranks start it
with torchrun and `batch.num_ranks`.
"""

import dataclasses
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from burnish.configs.schema import to_yaml
from burnish.policy.checkpoint.lineage import child_side_files, code_version, file_hash, policy_hash
from burnish.policy.checkpoint.released import load_policy, save_policy
from burnish.policy.encoding.tokenizer import load_tokenizer
from burnish.policy.training.config import TrainConfig
from burnish.policy.training.distributed import ensure_process_group, shutdown
from burnish.policy.training.forward import score
from burnish.policy.training.metrics import MetricLogger, WandbMode
from burnish.policy.training.progress import Progress
from burnish.policy.training.step import TrainStep
from burnish.sft.config import SftRun
from burnish.sft.data import Order, load, loss_tokens, micro_batches
from burnish.sft.loss import mean_nll, nll

logger = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 20


class DivergedError(RuntimeError):
    """Step after step is not finite: going on would only burn time."""


def main(run: SftRun) -> int:
    """Train until every epoch is done, then write `<run folder>/policy`."""
    ensure_process_group()
    try:
        return _train(run)
    finally:
        shutdown()


def _train(run: SftRun) -> int:
    if dist.get_world_size() != run.batch.num_ranks:
        raise ValueError(
            f"batch.num_ranks={run.batch.num_ranks}, but {dist.get_world_size()} processes were started: use "
            f"torchrun --nproc-per-node={run.batch.num_ranks} -m burnish.configs.cli sft ..."
        )
    run_dir = Path(run.runs) / run.name
    parents = {"policy": policy_hash(Path(run.policy)), "data": _data_hash(run)}
    if _is_finished(run_dir, run, parents):
        logger.info("SFT is done already: %s", run_dir / "policy")
        return 0
    model = load_policy(run.policy)
    tokenizer = load_tokenizer(Path(run.policy), run.encoding.system_token_id)
    dataset, counts = load(Path(run.data.path), run.data, tokenizer, run.encoding)
    order = Order(num_conversations=len(dataset), batch_size=run.batch.batch_size, seed=run.train.seed)
    num_batches = run.epochs * order.batches_per_epoch
    trainer = TrainStep(model, schedule(run.train, num_batches), forward=score)
    _claim(run_dir, run, parents)
    resumed = trainer.load(run_dir / "checkpoints")
    cursor = resumed["cursor"] if resumed else 0
    validation: list[Any] = []
    if run.data.validation_path:
        held_out, _ = load(Path(run.data.validation_path), run.data, tokenizer, run.encoding)
        validation = micro_batches(held_out, range(len(held_out)), run.batch)

    is_first = trainer.rank == 0
    log = (
        MetricLogger(run_dir, mode=_mode(run, is_first), resumed_from=cursor if resumed else None) if is_first else None
    )
    skipped_in_a_row = 0
    with Progress("sft", num_batches, done=cursor) as progress:
        while cursor < num_batches:
            started = time.perf_counter()
            mine = order.batch(cursor)[trainer.rank :: trainer.world]
            batches = micro_batches(dataset, mine, run.batch)
            metrics = trainer.step(batches, nll, denominator=loss_tokens(batches))
            cursor += 1
            skipped_in_a_row = skipped_in_a_row + 1 if metrics["train/step_skipped"] else 0
            if skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                raise DivergedError(f"{skipped_in_a_row} steps in a row were not finite; lower train.lr")
            if cursor % run.checkpoint_every == 0 or cursor == num_batches:
                if validation:
                    metrics["train/validation_loss"] = mean_nll(model, validation)
                trainer.save(run_dir / "checkpoints", extra={"cursor": cursor})
            if log is not None:
                seconds = time.perf_counter() - started
                metrics["train/loss_tokens"] = metrics.pop("train/denominator")
                metrics["train/tokens_per_s"] = sum(b.num_tokens for b in batches) * trainer.world / seconds
                metrics["train/epoch"] = cursor / order.batches_per_epoch
                log.log(metrics, step=cursor, policy_version=trainer.num_steps)
            progress.advance(loss=metrics["train/loss"], lr=metrics["train/lr"])
    if log is not None:
        log.close()
        _publish(run_dir, run, parents, model, {"steps": trainer.num_steps, "data": dataclasses.asdict(counts)})
        logger.info("SFT is done: policy %s, metrics %s", run_dir / "policy", run_dir / "metrics.jsonl")
    return 0


def schedule(config: TrainConfig, num_steps: int) -> TrainConfig:
    """The schedule over the whole run: its length, and a decay over the last fifth unless one is given."""
    return dataclasses.replace(config, total_steps=num_steps, decay_steps=config.decay_steps or num_steps // 5)


def _data_hash(run: SftRun) -> str:
    path = Path(run.data.path)
    if not path.is_file():
        raise FileNotFoundError(f"no data file at {path} (data.path)")
    return file_hash(path)


def _mode(run: SftRun, is_first: bool) -> WandbMode:
    return WandbMode[run.wandb] if is_first else WandbMode.disabled


def _claim(run_dir: Path, run: SftRun, parents: dict[str, str]) -> None:
    """Start the run folder, or make sure that it is this very run's.

    Raises:
        ValueError: the folder holds another run.
    """
    text = to_yaml(run)
    path = run_dir / "config.yaml"
    if path.is_file():
        before = json.loads((run_dir / "manifest.json").read_text())["parents"]
        if path.read_text() != text or before != parents:
            changed = [name for name in parents if before.get(name) != parents[name]] or ["config.yaml"]
            raise ValueError(
                f"{run_dir} holds another SFT run ({', '.join(changed)} differs); choose name=... or remove it"
            )
    elif dist.get_rank() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        _write(
            run_dir / "manifest.json", {"stage": "sft", "parents": parents, "code": code_version(), "finished": False}
        )
        _replace(path, text)


def _is_finished(run_dir: Path, run: SftRun, parents: dict[str, str]) -> bool:
    if not (run_dir / "config.yaml").is_file():
        return False
    _claim(run_dir, run, parents)
    return bool(json.loads((run_dir / "manifest.json").read_text())["finished"])


def _publish(
    run_dir: Path, run: SftRun, parents: dict[str, str], model: torch.nn.Module, facts: dict[str, Any]
) -> None:
    side = child_side_files(Path(run.policy), run_dir / ".side-files", stage="sft", parents=parents, **facts)
    save_policy(model, run_dir / "policy", side_files_from=side)  # pyright: ignore[reportArgumentType]
    for path in side.iterdir():
        path.unlink()
    side.rmdir()
    manifest = json.loads((run_dir / "manifest.json").read_text())
    manifest |= {"finished": True, "policy": policy_hash(run_dir / "policy"), **facts}
    _write(run_dir / "manifest.json", manifest)


def _write(path: Path, value: dict[str, Any]) -> None:
    _replace(path, json.dumps(value, indent=1) + "\n")


def _replace(path: Path, text: str) -> None:
    staged = path.with_name(f".{path.name}.writing")
    with staged.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)
