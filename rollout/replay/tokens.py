"""The tokens of one trajectory, again: by the engine that feeds what was sampled token by token, and by the trainer.

The engine's part is the engine itself (scheduler, paged caches, sampler), asked for one token at a time over the ids as
they were; what it draws is compared, and the recorded token is what it goes on with. The trainer's part is the forward
over the rows that rollout/layout.py makes of the sealed blocks. Both run under the version that sampled each token.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from burnish.policy.inference.config import PAGE_TOKENS, EngineConfig
from burnish.policy.inference.engine import Engine
from burnish.policy.inference.prefill import PrefillSource
from burnish.policy.inference.sequence import SamplingParams
from burnish.policy.model.transformer import Transformer
from burnish.policy.training.forward import score
from burnish.policy.training.logprobs import distributions
from burnish.policy.training.packing import pack
from burnish.rollout.agents import sampling_seed
from burnish.rollout.batch import TrainItem
from burnish.rollout.blocks import read_block
from burnish.rollout.config import RlRun
from burnish.rollout.layout import forced_experts, lay_out
from burnish.rollout.types import Block, BlockRef, Trajectory

PLAYED_AGAIN = (PrefillSource.cold, PrefillSource.resident)
"""Prefills after which a row's value depends on the ids before it alone."""


@dataclass(kw_only=True)
class Token:
    """One sampled token, as it was recorded and as it comes out again. Log-probabilities in nats."""

    context: str
    position: int
    turn: int
    token_id: int
    version: int
    recorded: float
    """Under what it was sampled from."""
    recorded_raw: float
    """Under the full vocabulary at temperature 1."""
    kept: tuple[int, ...] = ()
    """Kept set; empty is the full vocabulary."""
    engine: float | None = None
    engine_raw: float | None = None
    drawn: int | None = None
    """What the engine draws now."""
    trainer: float | None = None
    why_not: str = ""
    """Why it cannot be recomputed."""

    @property
    def place(self) -> tuple[str, int]:
        return self.context, self.position


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Recomputed against recorded log-probabilities of the tokens that could be recomputed."""

    count: int
    max_abs: float
    mean_abs: float
    mean_kl: float
    """Mean of r - log r - 1 with r the ratio of recomputed to recorded probability."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> "Comparison":
        """Pairs are (recomputed, recorded)."""
        differences = [again - before for again, before in pairs]
        if not differences:
            return cls(count=0, max_abs=0.0, mean_abs=0.0, mean_kl=0.0)
        count = len(differences)
        return cls(
            count=count,
            max_abs=max(map(abs, differences)),
            mean_abs=sum(map(abs, differences)) / count,
            # a ratio that overflows is no less different for being cut
            mean_kl=sum(math.exp(min(d, 50.0)) - d - 1 for d in differences) / count,
        )


class TokenReplay:
    """The sampled tokens of one trajectory and how to compute them again.

    Args:
        run: settings of the run, ids that are never sampled included.
        blocks: folder of the token logs.

    Raises:
        BlockError: a block is missing or not what was sealed.
    """

    def __init__(self, run: RlRun, trajectory: Trajectory, blocks: Path) -> None:
        self.run, self.blocks = run, blocks
        self.seed = sampling_seed(run.seed, trajectory.slot.slot_id)
        self.refs: dict[str, list[BlockRef]] = {}
        for ref in trajectory.blocks:
            self.refs.setdefault(ref.context_id, []).append(ref)
        parts = {context: [read_block(blocks, ref) for ref in refs] for context, refs in self.refs.items()}
        self.ids = {c: [int(i) for block in found for i in block.ids_T] for c, found in parts.items()}
        self.tokens = [token for context, found in parts.items() for token in _tokens_of(context, found)]

    @property
    def versions(self) -> list[int]:
        """Of the tokens that may be recomputed."""
        return sorted({token.version for token in self.tokens if not token.why_not})

    def give_up(self, version: int, reason: str) -> None:
        """No token of this version can be recomputed."""
        for token in self.tokens:
            if token.version == version and not token.why_not:
                token.why_not = reason

    def compute(self, model: Transformer, version: int) -> None:
        """Fills in engine and trainer for the tokens of `version`, whose weights the model holds."""
        for context in self.ids:
            mine = {
                t.position: t for t in self.tokens if t.version == version and t.context == context and not t.why_not
            }
            if mine:
                self._by_engine(model, context, mine)
                self._by_trainer(model, context, mine, version)

    def _by_engine(self, model: Transformer, context: str, mine: Mapping[int, Token]) -> None:
        ids, last = self.ids[context], max(mine)
        engine = Engine(model, self._engine_config(last + 1))
        rows: list[torch.Tensor] = []
        engine.on_rows = lambda work, hidden: rows.append(hidden[work[0].count - 1].clone())
        sampling = self.run.sampling
        params = SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, max_tokens=1, seed=self.seed
        )
        for position in sorted(mine):
            engine.add_request(f"{context}.{position}", context, ids[:position], params, keep_resident=True)
            ended = []
            while not ended:
                ended = engine.step()
            token, generation = mine[position], ended[0]
            token.drawn = generation.ids[0]
            token.engine_raw, token.engine = self._of_recorded(model, rows[-1], token)
            if token.drawn == token.token_id:
                # the sampler's own words, where it speaks of the same token
                token.engine_raw, token.engine = generation.lp_raw[0], generation.lp_behaviour[0]

    def _engine_config(self, num_tokens: int) -> EngineConfig:
        """The run's own, as small as one context needs."""
        pages = -(-num_tokens // PAGE_TOKENS) + 1
        return replace(self.run.engine, num_pages=pages, max_contexts=1, max_running=1, record_routes=False)

    @torch.no_grad()
    def _of_recorded(self, model: Transformer, hidden: torch.Tensor, token: Token) -> tuple[float, float]:
        """(raw, behaviour) log-probability of the recorded token from the row before it."""
        logits = model.logits(hidden.unsqueeze(0), deterministic=self.run.engine.deterministic)
        target = torch.tensor([token.token_id])
        kept = torch.tensor(token.kept, dtype=torch.int64)
        behaviour = distributions(
            logits,
            target,
            temperature=self.run.sampling.temperature,
            kept_ids_M=kept if token.kept else None,
            kept_offsets=torch.tensor([0, len(token.kept)]) if token.kept else None,
            never=self._never(model),
        )
        return float(logits.log_softmax(-1)[0, token.token_id]), float(behaviour[0, token.token_id])

    @torch.no_grad()
    def _by_trainer(self, model: Transformer, context: str, mine: Mapping[int, Token], version: int) -> None:
        item = TrainItem(blocks=tuple(self.refs[context]), advantage=0.0)
        step = lay_out([item], self.blocks, is_replayed=self.run.algo.replay_routes)
        budget = max([self.run.tokens_per_micro_batch, *(len(sample.ids) for sample in step.samples)])
        for packed in pack(step.samples, budget):
            scored = score(
                model,
                packed,
                deterministic=self.run.engine.deterministic,
                forced_experts=None if step.routes is None else forced_experts(packed, step.routes),
                temperature=self.run.sampling.temperature,
                never=self._never(model),
            )
            versions = packed.fields["version"][scored.row].long().tolist()
            # a row's fields and target speak of the token after it
            positions = (packed.rows.position[scored.row] + 1).tolist()
            for position, found, logprob in zip(positions, versions, scored.logprob.tolist(), strict=True):
                if found == version and position in mine:
                    mine[position].trainer = logprob

    def _never(self, model: Transformer) -> list[int]:
        return sorted({*model.config.placeholder_ids, *self.run.engine.reserved_ids})

    def engine_comparison(self) -> Comparison:
        return Comparison.of([(t.engine, t.recorded) for t in self.tokens if t.engine is not None])

    def trainer_comparison(self) -> Comparison:
        return Comparison.of([(t.trainer, t.recorded) for t in self.tokens if t.trainer is not None])


def _tokens_of(context: str, blocks: Sequence[Block]) -> list[Token]:
    odd = {entry.source for block in blocks for entry in block.prefills} - set(PLAYED_AGAIN)
    why_not = f"its context has a prefill from {min(odd)}, which is not played again" if odd else ""
    return [
        Token(
            context=context,
            position=block.start + place,
            turn=block.turn,
            token_id=int(block.ids_T[place]),
            version=int(block.version_T[place]),
            recorded=float(block.lp_behaviour_T[place]),
            recorded_raw=float(block.lp_raw_T[place]),
            kept=tuple(int(i) for i in block.kept(place)),
            why_not=why_not,
        )
        for block in blocks
        for place in block.sampled_T.nonzero()[0].tolist()
    ]
