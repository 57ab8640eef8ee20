"""Sampler: public numbers, the distribution of draws, and independence of the batch."""

import math

import pytest
import torch

from burnish.policy.inference.sampler import gumbel_noise, reserved_mask, sample
from burnish.policy.inference.sequence import SamplingParams


def params(seed: int = 0, **values) -> SamplingParams:
    return SamplingParams(max_tokens=1, seed=seed, **values)


def draw_of(logits: list[float], wanted: int, **values):
    """The result of a seed that draws `wanted`, for one row of logits."""
    for seed in range(200):
        drawn = sample(torch.tensor([logits]), [params(seed, **values)], [0])
        if drawn.ids.tolist() == [wanted]:
            return drawn
    raise AssertionError(f"200 seeds never drew {wanted}")


def test_top_p_keeps_the_smallest_set_and_renormalises_over_it():
    # serving paper, bug 41
    drawn = draw_of([2.0, 1.0, 0.0, -1.0], 0, top_p=0.9)
    assert drawn.kept_ids.tolist() == [0, 1, 2]
    assert drawn.kept_offsets.tolist() == [0, 3]
    assert drawn.lp_raw.item() == pytest.approx(-0.440, abs=5e-4)
    assert drawn.lp_behaviour.item() == pytest.approx(-0.408, abs=5e-4)


def test_a_set_that_reaches_top_p_within_rounding_is_not_widened():
    # RL paper, row 40: .5 + .3 is .8 up to rounding
    drawn = draw_of([math.log(p) for p in (0.5, 0.3, 0.15, 0.05)], 0, top_p=0.8)
    assert drawn.kept_ids.tolist() == [0, 1]
    assert drawn.lp_behaviour.item() == pytest.approx(-0.4700, abs=5e-5)
    assert drawn.lp_raw.item() == pytest.approx(-0.6931, abs=5e-5)


def test_temperature_scales_the_behaviour_and_leaves_the_raw_log_probability():
    # RL paper, row 37
    drawn = draw_of([2.0, 0.0], 0, temperature=2.0)
    assert drawn.lp_behaviour.item() == pytest.approx(-0.3133, abs=5e-5)
    assert drawn.lp_raw.item() == pytest.approx(-0.1269, abs=5e-5)
    assert drawn.kept_ids is None


def test_plain_sampling_has_one_log_probability_to_the_bit():
    logits = torch.randn(7, 50)
    drawn = sample(logits, [params(s) for s in range(7)], range(7))
    assert torch.equal(drawn.lp_raw, drawn.lp_behaviour)
    assert torch.equal(drawn.lp_raw, logits.log_softmax(-1).gather(1, drawn.ids.unsqueeze(1)).squeeze(1))


def test_temperature_zero_is_the_likeliest_token_with_a_set_of_one():
    logits = torch.randn(5, 30)
    drawn = sample(logits, [params(s, temperature=0.0, top_p=0.5) for s in range(5)], range(5))
    assert torch.equal(drawn.ids, logits.argmax(-1))
    assert drawn.lp_behaviour.tolist() == [0.0] * 5
    assert drawn.kept_ids.tolist() == drawn.ids.tolist()
    assert torch.equal(drawn.lp_raw, logits.log_softmax(-1).amax(-1))


def test_top_k_ties_go_to_the_lower_id_and_top_p_follows_top_k():
    drawn = sample(torch.tensor([[1.0, 3.0, 1.0, 1.0]]), [params(top_k=2)], [0])
    assert drawn.kept_ids.tolist() == [0, 1]
    # of the two kept, token 1 alone holds e^2 / (1 + e^2) = 0.88
    drawn = sample(torch.tensor([[1.0, 3.0, 1.0, 1.0]]), [params(top_k=2, top_p=0.85)], [0])
    assert drawn.kept_ids.tolist() == [1]


def test_only_truncated_rows_have_a_kept_set():
    rows = [params(0), params(1, top_k=3), params(2), params(3, temperature=0.0)]
    drawn = sample(torch.randn(4, 20), rows, range(4))
    sizes = drawn.kept_offsets.diff().tolist()
    assert sizes == [0, 3, 0, 1]
    second = drawn.kept_ids[drawn.kept_offsets[1] : drawn.kept_offsets[2]].tolist()
    assert drawn.ids[1].item() in second
    assert second == sorted(second)


def test_reserved_ids_are_never_drawn_and_their_draws_are_counted():
    reserved = reserved_mask(10, [3, 99, -1])
    logits = torch.zeros(400, 10)
    logits[:, 3] = 2.0
    drawn = sample(logits, [params(s) for s in range(400)], [5] * 400, reserved)
    assert 3 not in drawn.ids.tolist()
    # p(3) = e^2 / (9 + e^2) = 0.4509
    assert drawn.num_reserved == pytest.approx(400 * 0.4509, abs=4 * math.sqrt(400 * 0.25))
    assert drawn.lp_behaviour.tolist() == pytest.approx([-math.log(9)] * 400)
    assert drawn.lp_raw.tolist() == pytest.approx([-math.log(9 + math.e**2)] * 400)


@pytest.mark.parametrize("top_p", [1.0, 0.93])
def test_draws_follow_the_behaviour_distribution(top_p):
    """Chi-square over draws that differ in seed, and over draws that differ in position."""
    logits = torch.linspace(0, 2.2, 10)
    num = 20_000
    for seeds, positions in ((range(num), [17] * num), ([9] * num, range(num))):
        rows = [params(seed, top_p=top_p, temperature=0.8) for seed in seeds]
        drawn = sample(logits.expand(num, -1).contiguous(), rows, positions)
        probs = (logits / 0.8).softmax(-1)
        if top_p < 1:
            kept = torch.zeros(10, dtype=torch.bool)
            kept[drawn.kept_ids[: drawn.kept_offsets[1]]] = True
            probs = torch.where(kept, probs, 0.0) / probs[kept].sum()
        expected = probs * num
        counts = torch.bincount(drawn.ids, minlength=10).float()
        alive = expected > 0
        assert counts[~alive].sum() == 0
        chi = ((counts - expected)[alive].square() / expected[alive]).sum().item()
        degrees = int(alive.sum()) - 1
        # five standard deviations of the statistic
        assert chi < degrees + 5 * math.sqrt(2 * degrees), (chi, counts.tolist())
        assert torch.allclose(drawn.lp_behaviour, probs.log()[drawn.ids], atol=1e-5)


def test_noise_is_standard_gumbel_and_uncorrelated_along_every_axis():
    noise = gumbel_noise([5] * 600, range(600), 1000).double()
    count = noise.numel()
    assert noise.mean().item() == pytest.approx(0.5772157, abs=5 * 1.2825 / math.sqrt(count))
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    # P(noise > x) = 1 - exp(-exp(-x)), also far out where a top token is decided
    for x in (-1.0, 0.0, 2.0, 6.0, 9.0):
        p = -math.expm1(-math.exp(-x))
        assert (noise > x).double().mean().item() == pytest.approx(p, abs=5 * math.sqrt(p / count))
    centred = (noise - noise.mean()) / noise.std()
    bound = 5 / math.sqrt(count)
    for lag in (1, 2, 64):
        assert abs((centred[:, lag:] * centred[:, :-lag]).mean().item()) < bound, f"token lag {lag}"
        assert abs((centred[lag:] * centred[:-lag]).mean().item()) < bound, f"position lag {lag}"
    other = gumbel_noise([6] * 600, range(600), 1000).double()
    assert abs((centred * (other - other.mean())).mean().item()) < 2 * bound, "neighbouring seeds"


@pytest.mark.parametrize("vocab_size", [5, 115, 1000])
def test_a_draw_is_independent_of_the_batch(vocab_size):
    num = 23
    logits = torch.randn(num, vocab_size) * 3
    kinds = [{}, {"top_p": 0.9}, {"temperature": 0.7, "top_k": 4}, {"temperature": 0.0}]
    rows = [params(s * 7919, **kinds[s % 4]) for s in range(num)]
    positions = [s * 3 for s in range(num)]
    reserved = reserved_mask(vocab_size, [2])
    whole = sample(logits, rows, positions, reserved)
    for i in range(num):
        alone = sample(logits[i : i + 1].clone(), [rows[i]], [positions[i]], reserved)
        assert alone.ids[0] == whole.ids[i]
        assert alone.lp_raw[0] == whole.lp_raw[i], i
        assert alone.lp_behaviour[0] == whole.lp_behaviour[i], i


def test_seeds_of_any_size_are_distinct():
    seeds = [0, 1, 2**31, 2**32, 2**63, 2**64 - 1, -1]
    noise = gumbel_noise(seeds, [0] * len(seeds), 64)
    pairs = [(i, j) for i in range(len(seeds)) for j in range(i) if torch.equal(noise[i], noise[j])]
    # only -1 and 2^64 - 1 are the same 64-bit word
    assert pairs == [(6, 5)]


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_parameters_out_of_range_name_themselves(values, word):
    with pytest.raises(ValueError, match=word):
        params(0, **values)
