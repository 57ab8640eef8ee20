"""Parameter groups and the schedule."""

import pytest
from torch import nn

from burnish.policy.optim.groups import GroupRule, assign, param_groups
from burnish.policy.optim.schedule import learning_rate
from burnish.policy.training.config import TrainConfig


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.norm = nn.RMSNorm(2)
        self.attn = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.attn_sink = nn.Parameter(self.norm.weight.detach().clone())


def test_every_trainable_parameter_is_in_one_group():
    groups = assign(Named())
    assert groups == {
        "tables": ["embed.weight"],
        "offsets": ["attn_sink", "attn.bias"],
        "norms": ["norm.weight"],
        "matrices": ["attn.weight"],
    }
    decays = {g["name"]: g["weight_decay"] for g in param_groups(Named(), TrainConfig(weight_decay=0.1))}
    assert decays == {"tables": 0.0, "offsets": 0.0, "norms": 0.1, "matrices": 0.1}


def test_a_parameter_without_a_rule_is_named():
    with pytest.raises(ValueError, match=r"no optimizer group takes parameter attn_sink"):
        assign(Named(), [GroupRule(name="weights", pattern="weight$", has_decay=True)])


def test_warm_up_stable_decay():
    config = TrainConfig(lr=1.0, lr_min_ratio=0.1, warmup_steps=3, decay_steps=4, total_steps=12)
    rates = [learning_rate(config, step) for step in range(13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:8] == [1.0] * 4
    assert rates[8:] == pytest.approx([0.8682, 0.55, 0.2318, 0.1, 0.1], abs=1e-4)
    assert learning_rate(TrainConfig(lr=0.5), 10**6) == 0.5
