"""Mixture of experts of one layer: router, routed experts, the shared expert.

`gate.bias` steers text tokens' choice and `gate.bias_vl` image tokens'; both are buffers moved by a sign rule, never
by a gradient. Shapes: Q rows, D hidden, E experts, K experts a row, F width. Source: model paper section 11.
"""

import torch
from torch import nn

from burnish.kernels.moe.reference import experts_ref, route_ref, route_weights_ref, shared_expert_ref
from burnish.kernels.tile.reference import linear
from burnish.policy.config import ModelConfig
from burnish.policy.model.layers import Linear


class Gate(nn.Module):
    """weight [E, D]; bias, bias_vl [E] fp32 buffers."""

    bias: torch.Tensor
    bias_vl: torch.Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size, dtype=dtype))
        self.register_buffer("bias", torch.zeros(config.n_routed_experts, dtype=torch.float32))
        self.register_buffer("bias_vl", torch.zeros(config.n_routed_experts, dtype=torch.float32))


class Experts(nn.Module):
    """Stacked routed experts: w1 (gate), w3 (up) [E, F, D], w2 (down) [E, D, F]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        num, width, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.w1 = nn.Parameter(torch.empty(num, width, hidden, dtype=dtype))
        self.w3 = nn.Parameter(torch.empty(num, width, hidden, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(num, hidden, width, dtype=dtype))


class SharedExpert(nn.Module):
    """w1 (gate), w3 (up), w2 (down)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.w1 = Linear(config.hidden_size, config.moe_intermediate_size, dtype)
        self.w3 = Linear(config.hidden_size, config.moe_intermediate_size, dtype)
        self.w2 = Linear(config.moe_intermediate_size, config.hidden_size, dtype)


class MoE(nn.Module):
    """Released names: gate.*, experts.*, shared_experts.*"""

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.gate = Gate(config, dtype)
        self.experts = Experts(config, dtype)
        self.shared_experts = SharedExpert(config, dtype)

    def forward(
        self, x: torch.Tensor, live: torch.Tensor, forced: torch.Tensor | None, tiled: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route and apply.

        Args:
            x: [Q, D] normed input.
            live: [Q] bool; padding rows take no routed expert.
            forced: [Q, K] int64 experts recorded at sampling time, a row of -1 where absent; None routes every row.

        Returns:
            [Q, D] in x.dtype, and the experts [Q, K] int64 (-1 on padding rows).
        """
        config = self.config
        logits = linear(x.float(), self.gate.weight.float(), tiled) / config.gate_temp
        options = {"renormalize": config.norm_topk_prob, "scaling": config.routed_scaling_factor}
        experts, weights = route_ref(logits, self.gate.bias, config.num_experts_per_tok, **options)
        if forced is not None:
            experts = torch.where(forced >= 0, forced, experts)
            scores = torch.sqrt(nn.functional.softplus(logits))
            weights = route_weights_ref(scores, experts, **options)
        experts = torch.where(live.unsqueeze(1), experts, -1)
        bank, shared = self.experts, self.shared_experts
        routed = experts_ref(x, experts, weights, bank.w1, bank.w3, bank.w2, config.swiglu_limit)
        always = shared_expert_ref(x, shared.w1.weight, shared.w3.weight, shared.w2.weight, config.swiglu_limit, tiled)
        return (routed + always).to(x.dtype), experts
