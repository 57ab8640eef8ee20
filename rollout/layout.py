"""From sealed blocks to the rows that the trainer runs: what the engine did for a rollout, laid out for one step.

A version change while a context is being sampled opens an epoch: the engine prefills all ids again under the new weights,
and the experts it then uses are other ones. So where routes are replayed, each epoch of a context becomes a sample of its
own, which ends at the epoch's last token, has loss on the tokens sampled in it, and forces the experts recorded in it;
where an epoch recorded none (a position it only prefilled again) the trainer routes. Without route replay all epochs of a
context are the same rows, and one sample serves.

Shapes: T tokens of a sample, R rows of a micro-batch, L layers with experts, K experts a token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from burnish.policy.training.packing import PackedBatch, Sample
from burnish.rollout.batch import RolloutItem
from burnish.rollout.blocks import read_block
from burnish.rollout.types import ABSENT_ROUTE, Block

# a float32 field holds whole numbers up to here exactly
MAX_PLACES = 2**24


@dataclass(frozen=True, kw_only=True)
class StepSamples:
    """Samples of one optimizer step."""

    samples: list[Sample]
    """Fields: lp_behaviour, version (of the token), place (row of the token in `routes`)."""
    rollout_tokens: torch.Tensor
    """[B] trained tokens of each rollout."""
    routes: np.ndarray | None
    """uint16 [tokens of all samples, L, K], 0xFFFF where absent; None when nothing is replayed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Context:
    """The blocks of one context, joined."""

    ids_T: np.ndarray
    versions_T: np.ndarray
    """-1 where not sampled."""
    lp_T: np.ndarray
    row_versions_T: np.ndarray
    """Version under which a token's row was first run and its route recorded."""
    routes_TLK: np.ndarray | None
    kept: list[list[int]] | None
    """Kept set of each token; None where nothing was truncated."""

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> "_Context":
        assert blocks[0].start == 0, "a child context that shares its parent's tokens is laid out with its parent"
        versions_T = np.concatenate([block.version_T for block in blocks])
        # a row runs right before the next token is sampled; input rows run in the prefill before the turn's first one
        next_T = np.append(versions_T[1:], -1)
        following_T = np.concatenate([np.full(len(b), _first_version(b), np.int32) for b in blocks])
        is_truncated = any(len(block.kept_ids_M) for block in blocks)
        return cls(
            ids_T=np.concatenate([block.ids_T for block in blocks]),
            versions_T=versions_T,
            lp_T=np.concatenate([block.lp_behaviour_T for block in blocks]),
            row_versions_T=np.where(next_T >= 0, next_T, following_T),
            routes_TLK=_joined_routes(blocks),
            kept=[block.kept(t).tolist() for block in blocks for t in range(len(block))] if is_truncated else None,
        )

    def epochs(self, oldest_version: int, *, is_split: bool) -> Iterator[tuple[int, np.ndarray, np.ndarray | None]]:
        """(length, loss mask, routes) of each sample the context becomes."""
        trained_T = (self.versions_T >= 0) & (self.versions_T >= oldest_version)
        if not is_split or self.routes_TLK is None:
            if trained_T.any():
                yield _end(trained_T), trained_T, None
            return
        for version in np.unique(self.versions_T[trained_T]):
            mask_T = trained_T & (self.versions_T == version)
            routes = self.routes_TLK.copy()
            routes[self.row_versions_T != version] = ABSENT_ROUTE
            yield _end(mask_T), mask_T, routes


def lay_out(items: Sequence[RolloutItem], blocks: Path, *, is_replayed: bool) -> StepSamples:
    """Reads every item's blocks, whose digests are checked, and makes its samples.

    Args:
        is_replayed: force the experts that the engine recorded.

    Raises:
        BlockError: a block is missing or not what was sealed. Nothing was trained.
    """
    samples: list[Sample] = []
    routes: list[np.ndarray] = []
    counts = torch.zeros(len(items), dtype=torch.int64)
    place = 0
    for rollout, item in enumerate(items):
        if item.is_too_old:
            continue
        contexts: dict[str, list[Block]] = {}
        for ref in item.blocks:
            contexts.setdefault(ref.context_id, []).append(read_block(blocks, ref))
        for parts in contexts.values():
            context = _Context.of(parts)
            for length, mask_T, routes_TLK in context.epochs(item.oldest_version, is_split=is_replayed):
                counts[rollout] += int(mask_T.sum())
                samples.append(
                    Sample(
                        ids=context.ids_T[:length].tolist(),
                        loss_mask=mask_T[:length].tolist(),
                        fields={
                            "lp_behaviour": np.where(mask_T, context.lp_T, 0.0)[:length].tolist(),
                            "version": context.versions_T[:length].tolist(),
                            "place": list(range(place, place + length)),
                        },
                        rollout=rollout,
                        kept=None if context.kept is None else context.kept[:length],
                    )
                )
                place += length
                if routes_TLK is not None:
                    routes.append(routes_TLK[:length])
    assert place < MAX_PLACES, f"{place} tokens in one batch"
    joined = np.concatenate(routes) if routes else None
    assert joined is None or len(joined) == place, "every sample of a run records routes, or none does"
    return StepSamples(samples=samples, rollout_tokens=counts, routes=joined)


def forced_experts(batch: PackedBatch, routes: np.ndarray) -> list[torch.Tensor]:
    """L tensors [Q, K] of the experts to force on each decoder row; -1 where the trainer routes.

    A row's fields speak of its next token, so its own place is one below theirs. The last token of a sample has no next
    one; it carries no loss and is routed here.
    """
    next_place = batch.fields["place"].long()
    has_next = next_place > 0
    rows = torch.where(has_next, next_place - 1, torch.zeros_like(next_place))
    table = torch.from_numpy(routes.astype(np.int64))
    table[table == ABSENT_ROUTE] = -1
    forced = torch.where(has_next[:, None, None], table[rows], torch.full_like(table[:1], -1))
    return list(forced.unbind(1))


def _joined_routes(blocks: Sequence[Block]) -> np.ndarray | None:
    """Of a context; a turn that was given up before its first row ran recorded none, and its tokens are absent."""
    known = [block.routes_TLK for block in blocks if block.routes_TLK is not None]
    if not known:
        return None
    parts = [
        np.full((len(block), *known[0].shape[1:]), ABSENT_ROUTE, np.uint16)
        if block.routes_TLK is None
        else block.routes_TLK
        for block in blocks
    ]
    return np.concatenate(parts)


def _first_version(block: Block) -> int:
    sampled = block.version_T[block.sampled_T]
    return int(sampled[0]) if len(sampled) else -1


def _end(mask_T: np.ndarray) -> int:
    """One past the last loss token: what follows it changes nothing."""
    return int(np.flatnonzero(mask_T)[-1]) + 1
