"""burnish sft: the whole loop. Data, model, one optimizer step a batch, exact resume, a policy folder at the end.

The same command goes on where an interrupted one stopped, and does nothing when all is done. `batch.num_ranks`
processes share each batch.
"""

import dataclasses
import hashlib
import logging
from pathlib import Path
from typing import Any

from burnish.configs.schema import to_yaml
from burnish.policy.checkpoint.lineage import file_hash, policy_hash
from burnish.policy.checkpoint.released import load_policy
from burnish.policy.encoding.tokenizer import check_fits
from burnish.policy.training.config import TrainConfig
from burnish.policy.training.forward import score
from burnish.policy.training.packing import PackedBatch
from burnish.policy.training.step import TrainStep
from burnish.sft.config import SftRun
from burnish.sft.data import Order, load_all, micro_batches
from burnish.sft.loop import Loop, ranks
from burnish.sft.loss import mean_nll
from burnish.sft.run_folder import RunFolder

logger = logging.getLogger(__name__)


def main(run: SftRun) -> int:
    """Train until every epoch is done, then write `<run folder>/policy`."""
    with ranks("sft", run.batch.num_ranks, run.threads):
        return _train(run)


def _train(run: SftRun) -> int:
    parents = {"policy": policy_hash(Path(run.policy)), "data": _data_hash(run)}
    folder = RunFolder(path=Path(run.runs) / run.name, stage="sft", config=to_yaml(run), parents=parents)
    if folder.is_finished():
        logger.info("SFT is done already: %s", folder.policy)
        return 0
    model = load_policy(run.policy)
    tokenizer = check_fits(Path(run.policy), run.encoding.system_token_id)
    dataset, counts = load_all([run.data.path, *run.data.more], run.data, tokenizer, run.encoding)
    validation: list[Any] = []
    if run.data.validation_path:
        paths = [run.data.validation_path, *run.data.validation_more]
        held_out, _ = load_all(paths, run.data, tokenizer, run.encoding, limit=run.data.validation_limit)
        validation = micro_batches(held_out, range(len(held_out)), run.batch)
    order = Order(num_conversations=len(dataset), batch_size=run.batch.batch_size, seed=run.train.seed)
    num_batches = run.epochs * order.batches_per_epoch
    trainer = TrainStep(model, schedule(run.train, num_batches), forward=score)
    loop = Loop(
        title="sft",
        run_dir=folder.path,
        num_batches=num_batches,
        checkpoint_every=run.checkpoint_every,
        wandb=run.wandb,
        stop_at_loss=run.stop_at_loss,
    )
    every = run.validate_every or run.checkpoint_every

    def batches_at(cursor: int) -> list[PackedBatch]:
        return micro_batches(dataset, order.batch(cursor)[trainer.rank :: trainer.world], run.batch)

    def measure(cursor: int) -> dict[str, float]:
        metrics = {"train/epoch": cursor / order.batches_per_epoch}
        if validation and (cursor % every == 0 or cursor == num_batches):
            metrics["train/validation_loss"] = mean_nll(model, validation)
        return metrics

    with folder.claimed():
        loop.run(trainer, batches_at, measure)
        if trainer.rank == 0:
            folder.publish(Path(run.policy), model, {"steps": trainer.num_steps, "data": dataclasses.asdict(counts)})
            logger.info("SFT is done: policy %s, metrics %s", folder.policy, folder.path / "metrics.jsonl")
    return 0


def schedule(config: TrainConfig, num_steps: int) -> TrainConfig:
    """The schedule over the whole run: its length, and a decay over the last fifth unless one is given."""
    return dataclasses.replace(config, total_steps=num_steps, decay_steps=config.decay_steps or num_steps // 5)


def _data_hash(run: SftRun) -> str:
    hashes = []
    for key, name in (("path", run.data.path), *(("more", name) for name in run.data.more)):
        if not Path(name).is_file():
            raise FileNotFoundError(f"no data file at {name} (data.{key})")
        hashes.append(file_hash(Path(name)))
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()
