"""Which parameter gets which treatment, by rules on its name: each trainable parameter falls into exactly one group.

Source: model.md 19.2 of the design (weight decay on matrices and norm weights; none on biases, sinks, hyper-connection
offsets, embeddings and output heads).
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from burnish.policy.training.config import TrainConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GroupRule:
    """One group: the first rule whose pattern is found in a parameter's name takes it."""

    name: str
    pattern: str
    """Regular expression, searched in the dotted name."""
    has_decay: bool


RULES: tuple[GroupRule, ...] = (
    GroupRule(name="tables", pattern=r"(^|\.)(embed\w*|lm_head|head)\.weight$", has_decay=False),
    GroupRule(name="offsets", pattern=r"(bias\w*|sink\w*|(^|[._])base|(^|[._])scale)$", has_decay=False),
    GroupRule(name="norms", pattern=r"norm\w*(\.weight)?$", has_decay=True),
    GroupRule(name="matrices", pattern=r"", has_decay=True),
)


def assign(model: nn.Module, rules: Sequence[GroupRule] = RULES) -> dict[str, list[str]]:
    """Names of the trainable parameters by group, in the model's order.

    Raises:
        ValueError: a parameter that no rule takes.
    """
    groups: dict[str, list[str]] = {rule.name: [] for rule in rules}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        taken_by = next((rule.name for rule in rules if re.search(rule.pattern, name)), None)
        if taken_by is None:
            raise ValueError(f"no optimizer group takes parameter {name}: add a rule for it")
        groups[taken_by].append(name)
    return groups


def param_groups(model: nn.Module, config: TrainConfig, rules: Sequence[GroupRule] = RULES) -> list[dict[str, Any]]:
    """Optimizer groups with their weight decay; empty groups are left out. Logs the table once."""
    parameters = dict(model.named_parameters())
    groups = []
    for rule, names in zip(rules, assign(model, rules).values(), strict=True):
        if not names:
            continue
        decay = config.weight_decay if rule.has_decay else 0.0
        groups.append({"params": [parameters[n] for n in names], "weight_decay": decay, "name": rule.name})
        count = sum(parameters[n].numel() for n in names)
        logger.info("Optimizer group %s: %d tensors, %d weights, weight decay %g", rule.name, len(names), count, decay)
    frozen = sum(not p.requires_grad for p in parameters.values())
    if frozen:
        logger.info("Frozen: %d tensors", frozen)
    return groups
