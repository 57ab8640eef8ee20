"""burnish pretrain: next-token training of a fresh policy on recall documents or plain text, before it learns any task.

A small policy that was only ever shown demonstrations learns them by heart; one that can already take words from its
context learns what the demonstrations do with them. The same command goes on where an interrupted one stopped.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from burnish.configs.schema import to_yaml
from burnish.policy.checkpoint.lineage import file_hash, policy_hash
from burnish.policy.checkpoint.released import load_policy
from burnish.policy.encoding.tokenizer import Tokenizer, check_fits
from burnish.policy.model.graph_store import GraphStore
from burnish.policy.model.transformer import Transformer
from burnish.policy.training.config import TrainConfig
from burnish.policy.training.forward import score
from burnish.policy.training.packing import PackedBatch, pack
from burnish.policy.training.step import TrainStep
from burnish.sft.config import PretrainKind, PretrainRun
from burnish.sft.data import Order, cut, micro_batches
from burnish.sft.loop import Loop, ranks
from burnish.sft.plain_text import load_text
from burnish.sft.recall import RecallDocuments
from burnish.sft.run_folder import RunFolder

logger = logging.getLogger(__name__)

HELD_OUT = "held-out"
"""Seed of the documents that are only measured: a word, so that no run's number names the same sequence."""


def main(run: PretrainRun) -> int:
    """Train for run.steps steps, then write `<out>/policy`."""
    with ranks("pretrain", run.batch.num_ranks, run.threads):
        return _train(run)


def _train(run: PretrainRun) -> int:
    model = load_policy(run.policy)
    parents = {"policy": policy_hash(Path(run.policy))}
    if run.data.kind is PretrainKind.text:
        parents["data"] = _data_hash(run)
    folder = RunFolder(path=Path(run.out), stage="pretrain", config=to_yaml(run), parents=parents)
    if folder.is_finished():
        logger.info("Pre-training is done already: %s", folder.policy)
        return 0
    tokenizer = check_fits(Path(run.policy))
    trainer = TrainStep(model, schedule(run.train, run.steps), forward=score)
    batches_at = _source(run, tokenizer, trainer)
    held_out = RecallDocuments(tokenizer, run.data.recall, HELD_OUT).slice(0, run.num_heldout)
    measured = pack(held_out, max(run.batch.tokens_per_micro_batch, run.data.recall.max_tokens))

    def measure(cursor: int) -> dict[str, float]:
        is_due = cursor % run.evaluate_every == 0 or cursor == run.steps
        return recall_accuracy(model, measured) if is_due else {}

    loop = Loop(
        title="pretrain",
        run_dir=folder.path,
        num_batches=run.steps,
        checkpoint_every=run.checkpoint_every,
        wandb=run.wandb,
    )
    with folder.claimed():
        loop.run(trainer, batches_at, measure)
        if trainer.rank == 0:
            recall = recall_accuracy(model, measured)
            folder.publish(Path(run.policy), model, {"steps": trainer.num_steps, "recall": recall})
            logger.info("Pre-training is done: policy %s, held-out %s", folder.policy, recall)
    return 0


def schedule(config: TrainConfig, num_steps: int) -> TrainConfig:
    """The schedule over the whole run: its length, and a decay over the last third unless one is given."""
    return dataclasses.replace(config, total_steps=num_steps, decay_steps=config.decay_steps or num_steps // 3)


def _source(run: PretrainRun, tokenizer: Tokenizer, trainer: TrainStep) -> Callable[[int], list[PackedBatch]]:
    """This rank's micro-batches of the batch with a cursor."""
    size = run.batch.batch_size
    if run.data.kind is PretrainKind.recall:
        documents = RecallDocuments(tokenizer, run.data.recall, run.train.seed)

        def recall_at(cursor: int) -> list[PackedBatch]:
            samples = documents.slice(cursor * size, (cursor + 1) * size)
            return cut(samples[trainer.rank :: trainer.world], run.batch)

        return recall_at
    dataset = load_text(Path(run.data.path), run.data.max_tokens, tokenizer)
    order = Order(num_conversations=len(dataset), batch_size=size, seed=run.train.seed)

    def text_at(cursor: int) -> list[PackedBatch]:
        return micro_batches(dataset, order.batch(cursor)[trainer.rank :: trainer.world], run.batch)

    return text_at


@torch.no_grad()
def recall_accuracy(model: Transformer, batches: Sequence[PackedBatch]) -> dict[str, float]:
    """Greedy predictions against the targets.

    Returns:
        recall/token_accuracy: share of targets that are the most likely token; recall/exact: share of documents
        whose every target is.
    """
    num_right = num_targets = num_exact = num_documents = 0
    for batch in batches:
        output = model(batch.rows, GraphStore(model.config, batch.rows))
        row = batch.rows.decoder.index
        place = torch.nonzero(batch.loss_mask[row]).squeeze(1)
        target_row = row[place]
        is_right = model.logits(output.hidden[place]).argmax(-1) == batch.target[target_row]
        document = batch.rollout[target_row]
        num_right += int(is_right.sum())
        num_targets += len(is_right)
        num_documents += len(document.unique())
        num_exact += len(document.unique()) - len(document[~is_right].unique())
    return {"recall/token_accuracy": num_right / num_targets, "recall/exact": num_exact / num_documents}


def _data_hash(run: PretrainRun) -> str:
    path = Path(run.data.path)
    if not path.is_file():
        raise FileNotFoundError(f"no data file at {path} (data.path)")
    return file_hash(path)
