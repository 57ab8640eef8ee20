"""Learning rate by optimizer step: linear warm-up, a stable phase, a cosine decay. A pure function: nothing to save or restore."""

import math

from burnish.policy.training.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of the optimizer step with this index.

    Args:
        step: 0-based index among the steps that were applied.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    decay_start = config.total_steps - config.decay_steps
    if not config.total_steps or not config.decay_steps or step < decay_start:
        return config.lr
    progress = min(1.0, (step - decay_start + 1) / config.decay_steps)
    floor = config.lr * config.lr_min_ratio
    return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * progress))
