"""From a packed batch to the hidden state and the log-probability of every target token: what losses start from.

Shapes: R rows of the batch, N loss rows, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from burnish.policy.model.graph_store import GraphStore
from burnish.policy.model.transformer import Transformer
from burnish.policy.training.logprobs import distributions
from burnish.policy.training.packing import PackedBatch


@dataclass(kw_only=True)
class Scored:
    """What the policy says about the targets of a batch."""

    row: torch.Tensor
    """[N] int64, the loss rows' numbers in the batch: `batch.fields[name][row]` are their values."""
    logprob: torch.Tensor
    """[N] fp32 with its graph, log-probability of each target under what it was sampled from."""
    entropy: torch.Tensor
    """[N] fp32 without graph, nats, of the same distributions."""
    experts: list[torch.Tensor]
    """One tensor a layer [Q, K], the experts that were used."""


@dataclass(kw_only=True)
class TargetRows:
    """The loss rows of a batch, before the head."""

    row: torch.Tensor
    """[N] int64, as in `Scored`, ascending."""
    hidden: torch.Tensor
    """[N, D] final hidden states with their graph: what the head turns into the targets' logits."""
    experts: list[torch.Tensor]


def hidden_of_targets(
    model: Transformer,
    batch: PackedBatch,
    *,
    deterministic: bool = False,
    forced_experts: Sequence[torch.Tensor] | None = None,
) -> TargetRows:
    """Run a packed batch up to the head; see `score`."""
    output = model(
        batch.rows, GraphStore(model.config, batch.rows), deterministic=deterministic, forced_experts=forced_experts
    )
    decoder_row = batch.rows.decoder.index
    place = torch.nonzero(batch.loss_mask[decoder_row]).squeeze(1)
    return TargetRows(row=decoder_row[place], hidden=output.hidden[place], experts=output.experts)


def score(
    model: Transformer,
    batch: PackedBatch,
    *,
    deterministic: bool = False,
    forced_experts: Sequence[torch.Tensor] | None = None,
    temperature: float = 1.0,
    never: Sequence[int] = (),
) -> Scored:
    """Run a packed batch and score its targets over their kept sets; logits are made for loss rows only.

    Args:
        model: in the mode the caller wants gradients for.
        batch: every loss row must be in the decoder half.
        deterministic: bit for bit what the engine computes for the same rows.
        forced_experts: see Transformer.forward.
        temperature: divides the logits before the softmax.
        never: ids that are never sampled and so are no part of the policy; none where all text is a target (SFT).
    """
    targets = hidden_of_targets(model, batch, deterministic=deterministic, forced_experts=forced_experts)
    row, hidden = targets.row, targets.hidden
    if deterministic:  # linears run in whole 16-row tiles
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, -len(row) % 16))
    logits = model.logits(hidden, deterministic=deterministic)[: len(row)]
    target = batch.target[row]
    kept_ids, kept_offsets = batch.kept_of(row)
    all_logprobs = distributions(
        logits, target, temperature=temperature, kept_ids_M=kept_ids, kept_offsets=kept_offsets, never=never
    )
    logprob = all_logprobs.gather(1, target.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        entropy = torch.special.entr(all_logprobs.exp()).sum(-1)
    return Scored(row=row, logprob=logprob, entropy=entropy, experts=targets.experts)
