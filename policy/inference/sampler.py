"""Sampler: fp32 logits -> ids, raw and behaviour log-probabilities, and the sets that truncation kept.

Noise is Gumbel, a hash of (request seed, context position, token id): a draw does not depend on the batch, and a
request that is interrupted anywhere goes on with the same draws. Knows no request and no model.
Shapes: N rows that sample, V vocabulary, M ids of all kept sets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from burnish.policy.inference.sequence import SamplingParams

# a set whose probability reaches top_p within rounding is enough; the sampler's own set is what the trainer replays
_TOP_P_SLACK = 1e-6
_MASK32 = 0xFFFFFFFF


@dataclass(kw_only=True)
class Sampled:
    """One token a row."""

    ids: torch.Tensor
    """[N] int64."""
    lp_raw: torch.Tensor
    """[N] fp32, full softmax at temperature 1."""
    lp_behaviour: torch.Tensor
    """[N] fp32, of the distribution that was sampled."""
    kept_ids: torch.Tensor | None
    """[M] int64 ascending within a row, rows one after the other; None when no row was truncated."""
    kept_offsets: torch.Tensor | None
    """[N + 1] int64; a row that was not truncated has an empty range."""
    num_reserved: int
    """Rows whose draw would have been a reserved id, had it been allowed."""


def _mix32(x: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """A bijection of 32-bit words held in int32."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _signed(first)
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(second)
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _row_keys(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys of a row, by the finaliser of a 64-bit counter generator."""
    word = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = ((word ^ (word >> shift)) * factor) & 0xFFFFFFFFFFFFFFFF
    word ^= word >> 31
    return _signed(word & _MASK32), _signed(word >> 32)


def gumbel_noise(
    seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """[N, V] fp32 standard Gumbel noise, a pure function of each row's (seed, position) and the token id."""
    keys = [_row_keys(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    key = torch.tensor(keys, dtype=torch.int32, device=device).view(-1, 2)
    token = torch.arange(vocab_size, dtype=torch.int32, device=device) * _signed(0x9E3779B9)
    words = _mix32(token + key[:, :1], 0x7FEB352D, 0x846CA68B) ^ key[:, 1:]
    words = _mix32(words, 0x85EBCA6B, 0xC2B2AE35) & 0x7FFFFFFF
    # fine steps where the uniform is near 0, that is where the noise is large
    uniform = ((words.float() + 0.5) * 2.0**-31).clamp_max(1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def reserved_mask(vocab_size: int, reserved: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor | None:
    """[V] bool of ids that are never sampled; None when there are none."""
    inside = sorted({token for token in reserved if 0 <= token < vocab_size})
    if not inside:
        return None
    mask = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    mask[inside] = True
    return mask


def _truncate(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[n, V] bool of kept tokens: the top_k likeliest (ties to the lower id), of these the smallest top_p set."""
    best, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    limit = torch.where(top_k > 0, top_k, scaled.shape[1]).unsqueeze(1)
    best = best.masked_fill(rank >= limit, float("-inf"))
    probs = best.double().softmax(-1)
    before = probs.cumsum(-1) - probs
    is_kept = (before < (top_p.double() - _TOP_P_SLACK).unsqueeze(1)) | (top_p >= 1).unsqueeze(1)
    is_kept = (is_kept | (rank == 0)) & (best > float("-inf"))
    return torch.zeros_like(is_kept).scatter(1, order, is_kept)


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    reserved: torch.Tensor | None = None,
) -> Sampled:
    """Draw one token a row.

    Args:
        logits: [N, V] fp32.
        params: one a row.
        positions: context position of the token to be drawn, one a row.
        reserved: [V] bool, ids that are never drawn.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    lp_all = logits.log_softmax(-1)
    noise = gumbel_noise([p.seed for p in params], positions, vocab_size, device)
    temperature = torch.tensor([p.temperature for p in params], device=device)
    greedy = temperature == 0
    is_plain = all(p.temperature == 1.0 for p in params)
    if not is_plain:
        noise = noise.masked_fill(greedy.unsqueeze(1), 0.0)
    scaled = logits if is_plain else logits / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    perturbed = scaled + noise
    behaviour, num_reserved = scaled, 0
    if reserved is not None:
        best_reserved = perturbed[:, reserved].amax(-1)
        behaviour = scaled.masked_fill(reserved, float("-inf"))
        perturbed = perturbed.masked_fill(reserved, float("-inf"))
        num_reserved = int((best_reserved > perturbed.amax(-1)).sum())
    cut = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.temperature == 0]
    rows = torch.tensor(cut, dtype=torch.int64, device=device)
    kept = None
    if cut:
        top_k = torch.tensor([1 if params[r].temperature == 0 else params[r].top_k for r in cut], device=device)
        top_p = torch.tensor([params[r].top_p for r in cut], device=device)
        kept = _truncate(behaviour[rows], top_k, top_p)
        behaviour = behaviour.index_copy(0, rows, behaviour[rows].masked_fill(~kept, float("-inf")))
        perturbed = perturbed.index_copy(0, rows, perturbed[rows].masked_fill(~kept, float("-inf")))
    ids = perturbed.argmax(-1)
    column = ids.unsqueeze(1)
    lp_raw = lp_all.gather(1, column).squeeze(1)
    # nothing scaled, reserved or cut: the behaviour is the raw distribution, to the bit
    lp_behaviour = lp_raw if behaviour is logits else behaviour.log_softmax(-1).gather(1, column).squeeze(1)
    kept_ids = kept_offsets = None
    if kept is not None:
        counts = torch.zeros(num_rows, dtype=torch.int64, device=device)
        counts[rows] = kept.sum(-1)
        kept_ids = torch.nonzero(kept)[:, 1]
        kept_offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return Sampled(
        ids=ids,
        lp_raw=lp_raw,
        lp_behaviour=lp_behaviour,
        kept_ids=kept_ids,
        kept_offsets=kept_offsets,
        num_reserved=num_reserved,
    )
