"""Packing: variable-length samples -> batches of rows for the trainer's forward.

A batch holds whole samples (never a fragment), each a context of its own: nothing is attended to across samples, and
nothing is predicted across their ends. Losses must not depend on how samples are packed; the denominator is the
caller's. Shapes: R rows of a batch (padded to 16), T tokens of a sample, M entries of all kept sets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from burnish.policy.model.rows import Rows, plain_rows


@dataclass(kw_only=True)
class Sample:
    """One context to train on."""

    ids: Sequence[int]
    """T token ids."""
    loss_mask: Sequence[bool]
    """T flags: the token at this place is a target (sampled by the policy, or an assistant token)."""
    fields: dict[str, Sequence[float]] = field(default_factory=dict)
    """Further values of each token (advantage, behaviour log-probability, ...), T each, aligned with `ids`."""
    rollout: int = 0
    """Which rollout the sample belongs to; several contexts of one rollout share it."""
    kept: Sequence[Sequence[int]] | None = None
    """T sets of ids that truncation left when the token was sampled; an empty one, or None, is the full vocabulary."""

    def __post_init__(self) -> None:
        for name, values in {"loss_mask": self.loss_mask, "kept": self.kept, **self.fields}.items():
            if values is not None and len(values) != len(self.ids):
                raise ValueError(f"sample: {name} has {len(values)} values, ids has {len(self.ids)}")


@dataclass(kw_only=True)
class PackedBatch:
    """Rows of one forward and what each row predicts: everything at row p speaks of the token at position p+1."""

    rows: Rows
    target: torch.Tensor
    """[R] int64, the next token; 0 where there is none."""
    loss_mask: torch.Tensor
    """[R] bool, the next token is a target."""
    rollout: torch.Tensor
    """[R] int64, rollout of the row's sample; -1 on padding."""
    fields: dict[str, torch.Tensor]
    """name -> [R] fp32, value of the next token; 0 where there is none."""
    num_tokens: int
    """Live rows."""
    kept_ids: torch.Tensor | None = None
    """[M] int64, kept sets of the next tokens, one after the other; None when nothing was truncated."""
    kept_offsets: torch.Tensor | None = None
    """[R + 1] int64, see `logprobs.distributions`."""

    def kept_of(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Kept sets of these rows [N] in the same form: ids and offsets [N + 1]."""
        if self.kept_ids is None or self.kept_offsets is None:
            return None, None
        counts = self.kept_offsets.diff()[row]
        ends = counts.cumsum(0)
        place = torch.arange(int(counts.sum()), device=row.device)
        place = place + torch.repeat_interleave(self.kept_offsets[row] - (ends - counts), counts)
        return self.kept_ids[place], torch.nn.functional.pad(ends, (1, 0))


def pack(samples: Sequence[Sample], tokens_per_batch: int, *, max_context: int | None = None) -> list[PackedBatch]:
    """Batches of whole samples, as `bins` puts them together; same arguments and errors."""
    return [batch_of([samples[i] for i in members]) for members in bins(samples, tokens_per_batch, max_context)]


def bins(samples: Sequence[Sample], tokens_per_batch: int, max_context: int | None = None) -> list[list[int]]:
    """Numbers of the samples of each batch: first-fit decreasing into at most `tokens_per_batch` rows; ties keep the
    given order.

    Args:
        samples: whole contexts; a sample without a target is packed too (its rows cost time, not loss).
        tokens_per_batch: rows a batch holds at most.
        max_context: longest context the model takes, tokens.

    Raises:
        ValueError: a sample is empty, longer than a batch or than `max_context`, or the samples' fields differ.
    """
    names = set(samples[0].fields) if samples else set()
    for index, sample in enumerate(samples):
        size = len(sample.ids)
        if size == 0:
            raise ValueError(f"sample {index} is empty")
        if size > tokens_per_batch:
            raise ValueError(
                f"sample {index} has {size} tokens, a batch holds {tokens_per_batch}; raise tokens_per_batch "
                f"or shorten the sample"
            )
        if max_context is not None and size > max_context:
            raise ValueError(f"sample {index} has {size} tokens, the model's context is {max_context}")
        if set(sample.fields) != names:
            raise ValueError(f"sample {index} has fields {sorted(sample.fields)}, the first sample {sorted(names)}")
    order = sorted(range(len(samples)), key=lambda i: (-len(samples[i].ids), i))
    found: list[list[int]] = []
    room: list[int] = []
    for index in order:
        size = len(samples[index].ids)
        slot = next((b for b, left in enumerate(room) if left >= size), None)
        if slot is None:
            found.append([])
            room.append(tokens_per_batch)
            slot = len(found) - 1
        found[slot].append(index)
        room[slot] -= size
    return found


def batch_of(samples: Sequence[Sample]) -> PackedBatch:
    """One batch of these samples, in this order."""
    rows = plain_rows([sample.ids for sample in samples])
    size = len(rows)

    def shifted(columns: list[Sequence], dtype: torch.dtype) -> torch.Tensor:
        values = [value for column in columns for value in [*column[1:], 0]]
        out = torch.zeros(size, dtype=dtype)
        out[: len(values)] = torch.tensor(values, dtype=dtype)
        return out

    kept_ids = kept_offsets = None
    if any(sample.kept is not None for sample in samples):
        columns = [sample.kept if sample.kept is not None else [()] * len(sample.ids) for sample in samples]
        sets = [kept for column in columns for kept in [*column[1:], ()]]
        counts = torch.zeros(size, dtype=torch.int64)
        counts[: len(sets)] = torch.tensor([len(kept) for kept in sets])
        kept_ids = torch.tensor([token for kept in sets for token in kept], dtype=torch.int64)
        kept_offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    rollout = torch.full((size,), -1, dtype=torch.int64)
    owners = [sample.rollout for sample in samples for _ in sample.ids]
    rollout[: len(owners)] = torch.tensor(owners, dtype=torch.int64)
    return PackedBatch(
        rows=rows,
        target=shifted([sample.ids for sample in samples], torch.int64),
        loss_mask=shifted([sample.loss_mask for sample in samples], torch.bool),
        rollout=rollout,
        fields={
            name: shifted([sample.fields[name] for sample in samples], torch.float32)
            for name in (samples[0].fields if samples else ())
        },
        num_tokens=len(owners),
        kept_ids=kept_ids,
        kept_offsets=kept_offsets,
    )
