"""Transformer: embedding, encoder and decoder halves, final collapse and head; one forward for training and serving.

It knows rows and a store, not requests, batches or losses. Shapes: R rows, Q rows of a half, S streams, D hidden,
V vocabulary, L layers, K experts a row. Source: DeepSeek-V4.1 report sections 2.2-2.4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from burnish.kernels.mhc.reference import collapse_ref
from burnish.kernels.tile.reference import TILE, linear, one_thread
from burnish.policy.config import ConfigError, ModelConfig
from burnish.policy.model.block import Block, Carry
from burnish.policy.model.layers import RMSNorm
from burnish.policy.model.rows import KVStore, Rows


@dataclass(kw_only=True)
class Output:
    """Result of one forward."""

    hidden: torch.Tensor
    """[Q, D] final-normed hidden of the decoder half's rows."""
    experts: list[torch.Tensor]
    """L tensors [Q, K] int64, -1 on padding rows."""
    captures: dict[str, torch.Tensor]
    """What was asked for: streams.<layer> [Q, S, D] before a block, topk_indices.<layer> [Q, K]."""


class Embedding(nn.Module):
    """weight [V, D]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype))


class Head(nn.Module):
    """weight [V, D], kept in fp32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=torch.float32))


class Transformer(nn.Module):
    """Released names at the top: embed, layers.<i>, norm, head.

    Args:
        config: architecture; n-gram memory and draft layers are not part of this text core.
        dtype: of everything but the fp32 islands.

    Raises:
        ConfigError: the config asks for a part that this model does not have.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if config.engram_layer_ids:
            raise ConfigError(
                f"model config: engram_layer_ids {config.engram_layer_ids} asks for n-gram memories, "
                f"which this text core does not run; set it to []"
            )
        self.config = config
        self.embed = Embedding(config, dtype)
        self.layers = nn.ModuleList(Block(config, plan, dtype) for plan in config.layers())
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.head = Head(config)

    def reset_parameters(self, seed: int) -> None:
        """Initial weights: N(0, initializer_range^2) matrices, unit norms and mHC scales, zero biases and sinks.

        The head starts as a copy of the embedding (they part with the first step): a small model then learns to say
        what it reads in far fewer steps.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith(("norm.weight", "_scale")):
                    parameter.fill_(1.0)
                elif name.endswith(("_base", "attn_sink")):
                    parameter.zero_()
                else:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(noise * self.config.initializer_range)
            self.head.weight.copy_(self.embed.weight)
            for buffer in self.buffers():
                buffer.zero_()

    def forward(
        self,
        rows: Rows,
        store: KVStore,
        *,
        deterministic: bool = False,
        forced_experts: Sequence[torch.Tensor] | None = None,
        capture: bool = False,
    ) -> Output:
        """Run the rows.

        Args:
            rows: layout; padded to multiples of 16 in both halves when `deterministic`.
            store: where keys are written and read.
            deterministic: a row's result is bit for bit independent of the other rows.
            forced_experts: L tensors [Q, K] int64 recorded at sampling time, -1 where absent.
            capture: keep streams and selections for parity checks.

        Raises:
            ValueError: rows not padded in deterministic mode.
        """
        if deterministic and (len(rows) % TILE or rows.decoder.index.shape[0] % TILE):
            raise ValueError(
                f"deterministic forward: rows must be padded to multiples of {TILE}, got {len(rows)} and "
                f"{rows.decoder.index.shape[0]} (decoder half); build them with pad=True"
            )
        with one_thread(deterministic):
            return self._run(rows, store, deterministic, forced_experts, capture)

    def _run(
        self,
        rows: Rows,
        store: KVStore,
        deterministic: bool,
        forced_experts: Sequence[torch.Tensor] | None,
        capture: bool,
    ) -> Output:
        embedded = self.embed.weight[rows.token_id]
        streams = embedded.unsqueeze(1).expand(-1, self.config.hc_mult, -1).contiguous()
        pre = torch.zeros(len(rows), self.config.hc_mult, dtype=torch.float32, device=embedded.device)
        pre[:, 0] = 1.0
        carry, experts, captures = Carry(streams=streams, pre=pre), [], {}
        for layer, block in enumerate(self.layers):
            if capture:
                captures[f"streams.{layer}"] = carry.streams
            forced = None if forced_experts is None else forced_experts[layer]
            carry, chosen = block(carry, rows, store, forced, deterministic)
            experts.append(chosen)
            if capture and carry.selection is not None and layer == block.plan.index_source:  # pyright: ignore[reportAttributeAccessIssue]
                captures[f"topk_indices.{layer}"] = carry.selection.indices
                if layer == self.config.candidate_source_layer_id and carry.selection.candidates is not None:
                    captures[f"candidate_blocks.{layer}"] = carry.selection.candidates
        hidden = self.norm(collapse_ref(carry.streams, carry.pre))
        return Output(hidden=hidden, experts=experts, captures=captures)

    def logits(self, hidden: torch.Tensor, *, deterministic: bool = False) -> torch.Tensor:
        """fp32 logits [Q, V] of final hidden rows [Q, D]."""
        with one_thread(deterministic):
            return linear(hidden.float(), self.head.weight, deterministic)
