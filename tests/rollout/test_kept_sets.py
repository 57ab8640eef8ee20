"""What the engine sampled from is what the trainer normalises over: kept sets, temperature and ids that are never drawn.

The way of an RL rollout without its processes: engine, token log, sealed blocks, layout, trainer.
"""

import numpy as np
import pytest
import torch
from loss_inputs import inputs, normaliser, values
from small_model import small_config

from burnish.policy.checkpoint.released import load_policy, save_policy
from burnish.policy.inference.config import EngineConfig
from burnish.policy.inference.engine import Engine
from burnish.policy.inference.sequence import SamplingParams
from burnish.policy.model.transformer import Transformer
from burnish.policy.training.config import TrainConfig
from burnish.policy.training.logprobs import distributions
from burnish.rollout.batch import TrainItem
from burnish.rollout.blocks import read_block
from burnish.rollout.config import AlgoConfig, RlRun, SamplingConfig
from burnish.rollout.layout import lay_out
from burnish.rollout.losses import load_loss
from burnish.rollout.settings import TrainerSettings
from burnish.rollout.token_log import TokenLog
from burnish.rollout.trainer import Trainer

NEVER = (2, 4, 9)  # padding and image by the model's config, 9 by the engine's


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    model = Transformer(small_config())
    model.reset_parameters(0)
    return save_policy(model, tmp_path_factory.mktemp("policy") / "p")


def play(policy, blocks, sampling: dict, *, deterministic: bool) -> list[TrainItem]:
    """Three rollouts of two turns, batched in one engine, their blocks as an agent writes them."""
    config = EngineConfig(
        num_pages=16, max_contexts=4, max_running=4, max_step_rows=64, deterministic=deterministic,
        reserved_ids=[9],
    )  # fmt: skip
    engine = Engine(load_policy(policy).requires_grad_(False), config)
    logs = {f"{i}": TokenLog(blocks, f"000-00000{i}-000-00") for i in range(3)}
    contexts: dict[str, list[int]] = {name: [] for name in logs}
    for turn in range(2):
        for name, log in logs.items():
            new = torch.randint(10, 115, (5 + 3 * int(name),)).tolist()
            log.open_turn(context_id="0", turn=turn, start=len(contexts[name]), input_ids=new)
            contexts[name] += new
            params = SamplingParams(max_tokens=12, stop_ids=(1,), seed=int(name), **sampling)
            engine.add_request(f"{name}.{turn}", name, contexts[name], params, True)
        while engine.has_work:
            for done in engine.step():
                log = logs[done.context_id]
                start = len(contexts[done.context_id]) - log._open().num_tokens
                log.append_sampled(done.ids, done.lp_raw, done.lp_behaviour, done.versions, done.kept)
                contexts[done.context_id] += done.ids
                skipped = max(0, start - done.cached_tokens)
                routes = np.asarray(done.routes)[skipped:]
                log.append_routes(done.cached_tokens + skipped - start, routes)
                log.seal_turn()
    for log in logs.values():
        log.close()
    return [TrainItem(blocks=tuple(log.refs), advantage=1.0 - i) for i, log in enumerate(logs.values())]


def make_trainer(policy, blocks, sampling: dict, *, deterministic: bool) -> Trainer:
    settings = TrainerSettings(
        policy=str(policy), blocks=str(blocks), checkpoints=str(blocks / "c"), weights=str(blocks / "w"),
        train=TrainConfig(lr=1e-3), algo=AlgoConfig(), temperature=sampling.get("temperature", 1.0),
        reserved_ids=(9,), max_rollout_tokens=24, tokens_per_micro_batch=96, deterministic=deterministic,
    )  # fmt: skip
    return Trainer(settings)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_p": 0.8},
        {"top_k": 5},
        {"temperature": 1.3, "top_k": 30, "top_p": 0.9},
    ],
    ids=str,
)
def test_the_trainer_recomputes_what_the_engine_recorded(policy, tmp_path, sampling):
    items = play(policy, tmp_path, sampling, deterministic=True)
    trainer = make_trainer(policy, tmp_path, sampling, deterministic=True)
    result = trainer.mismatch(items)
    assert result["tokens"] >= 30
    assert result["max_abs_lp"] == 0.0, "deterministic: the same bits"
    is_cut = "top_p" in sampling or "top_k" in sampling
    refs = [ref for item in items for ref in item.blocks]
    sets = [
        block.kept(t) for ref in refs for block in [read_block(tmp_path, ref)] for t in np.flatnonzero(block.sampled_T)
    ]
    assert all(len(kept) > 0 for kept in sets) == is_cut
    if is_cut:
        assert len({len(kept) for kept in sets}) > 1 or "top_p" not in sampling
        assert not {int(token) for kept in sets for token in kept} & set(NEVER)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.8}], ids=str)
def test_the_fast_forwards_agree_closely(policy, tmp_path, sampling):
    items = play(policy, tmp_path, sampling, deterministic=False)
    trainer = make_trainer(policy, tmp_path, sampling, deterministic=False)
    micro_batches = trainer._lay_out(items)
    with torch.no_grad():
        scored = [trainer._score(trainer.model, packed) for packed in micro_batches]
    errors = torch.cat(
        [(s.logprob - p.fields["lp_behaviour"][s.row]).abs() for s, p in zip(scored, micro_batches, strict=True)]
    )
    # another order of sums may move one value across an FP4 or FP8 bin: those few tokens differ by more
    assert errors.median() < 1e-5
    assert (errors < 1e-4).float().mean() > 0.9


def test_without_the_recorded_sets_the_ratios_would_be_biased(policy, tmp_path):
    sampling = {"temperature": 0.7, "top_p": 0.8}
    items = play(policy, tmp_path, sampling, deterministic=True)
    trainer = make_trainer(policy, tmp_path, sampling, deterministic=True)
    step = lay_out(items, tmp_path, is_replayed=True)
    for sample in step.samples:
        assert sample.kept is not None
        sample.kept = None
    trainer._routes = step.routes
    from burnish.policy.training.packing import pack

    (packed,) = pack(step.samples, 256)
    with torch.no_grad():
        scored = trainer._score(trainer.model, packed)
    difference = packed.fields["lp_behaviour"][scored.row] - scored.logprob
    assert difference.mean() > 0.05


def test_a_step_trains_inside_the_kept_sets_only(policy, tmp_path):
    """No id outside every kept set gets a gradient through the head."""
    sampling = {"top_k": 3}
    items = play(policy, tmp_path, sampling, deterministic=True)
    trainer = make_trainer(policy, tmp_path, sampling, deterministic=True)
    refs = [ref for item in items for ref in item.blocks]
    inside = {int(token) for ref in refs for token in read_block(tmp_path, ref).kept_ids_M}
    outside = sorted(set(range(115)) - inside)
    assert outside
    total = torch.zeros(())
    for packed in trainer._lay_out(items):
        scored = trainer._score(trainer.model, packed)
        total = total + scored.logprob.sum()
        assert (scored.entropy <= np.log(3) + 1e-5).all()
    grad = torch.autograd.grad(total, trainer.model.head.weight)[0]
    assert (grad[outside] == 0).all()
    assert (grad[sorted(inside)].abs().sum(1) > 0).any()
    before = trainer.model.head.weight.detach().clone()
    result = trainer.train("r", items)
    assert not result.is_skipped
    assert result.metrics["train/mismatch_kl_fresh"] == 0.0
    assert not torch.equal(trainer.model.head.weight, before)


def test_truncated_sampling_is_allowed_in_rl_and_greedy_is_not():
    run = RlRun(name="x", sampling=SamplingConfig(top_p=0.8, top_k=5))
    assert run.sampling.top_p == 0.8
    with pytest.raises(ValueError, match=r"sampling.temperature.*> 0 in RL"):
        RlRun(name="x", sampling=SamplingConfig(temperature=0.0))


def at_targets(logits, targets, **options):
    return distributions(logits, targets, **options).gather(1, targets.unsqueeze(1)).squeeze(1)


def test_temperature_divides_logits_not_logprobs():
    lp = at_targets(values(2.0, 0.0).unsqueeze(0), torch.tensor([0]), temperature=2.0)
    assert lp.item() == pytest.approx(-0.3133, abs=5e-5)
    assert (torch.log_softmax(values(2.0, 0.0), -1)[0] / 2).item() == pytest.approx(-0.0635, abs=5e-5)


def test_the_kept_set_shares_one_action_space():
    logits = values(0.5, 0.3, 0.15, 0.05).log().expand(3, 4).clone().requires_grad_()
    kept = {"kept_ids_M": torch.tensor([0, 1, 1, 0]), "kept_offsets": torch.tensor([0, 2, 2, 4])}
    lp = at_targets(logits, torch.tensor([0, 0, 1]), **kept)
    torch.testing.assert_close(lp, values(0.5 / 0.8, 0.5, 0.3 / 0.8).log())  # the empty set is the full vocabulary
    assert lp[0].item() == pytest.approx(-0.4700, abs=5e-5)
    assert lp[1].item() == pytest.approx(-0.6931, abs=5e-5)
    (grad,) = torch.autograd.grad(lp[0], logits)
    torch.testing.assert_close(grad[0], values(1 - 0.625, -0.375, 0, 0))
    assert (grad[1:] == 0).all()
    # engine and trainer agree: the ratio is 1, not 0.8
    out = load_loss("clipped")(inputs(lp.detach(), behaviour=values(0.625, 0.5, 0.375).log()), normaliser(3))
    assert float(out.metrics["train/ratio"][0]) == pytest.approx(3)
    with pytest.raises(ValueError, match=r"token 0 \(id 3\) is not in its kept set of 2 ids"):
        at_targets(logits, torch.tensor([3, 0, 1]), **kept)
    with pytest.raises(ValueError, match="temperature must be > 0"):
        at_targets(logits, torch.tensor([0, 0, 1]), temperature=0.0)
