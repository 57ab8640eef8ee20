"""Settings of the train step: wrong ones are refused with the numbers that would be right."""

import pytest

from burnish.policy.training.config import BatchConfig, BatchError, TrainConfig, accumulation_steps


def test_a_batch_that_cannot_be_factored_names_the_nearest_totals():
    with pytest.raises(BatchError, match=r"252 \(18 steps\) or 266 \(19 steps\)"):
        accumulation_steps(256, 2, 7)
    assert accumulation_steps(256, 2, 8) == 16
    with pytest.raises(BatchError, match=r"256/24 = 10.67.*240 \(10 steps\) or 264 \(11 steps\)"):
        BatchConfig(batch_size=256, micro_batch_size=3, num_ranks=8)
    with pytest.raises(BatchError, match=r"take 14 \(1 steps\)$"):
        accumulation_steps(3, 2, 7)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"lr": 0.0}, "train.lr is out of range: got 0.0"),
        ({"zero_stage": 3}, r"train.zero_stage is out of range: got 3 \(stage 3"),
        ({"total_steps": 10, "warmup_steps": 6, "decay_steps": 5}, "= 11 is more than train.total_steps = 10"),
    ],
)
def test_wrong_settings_are_named(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        TrainConfig(**settings)
