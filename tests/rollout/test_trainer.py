"""Engine and trainer on the same rollouts: bit for bit per version, through swaps in the middle of a turn; then a step."""

import asyncio
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from burnish.envs.errors import UserError
from burnish.policy.checkpoint.released import load_policy
from burnish.policy.config import InitRun
from burnish.policy.encoding.config import EncodingConfig
from burnish.policy.encoding.conversation import Conversation
from burnish.policy.encoding.messages import Message, Role
from burnish.policy.encoding.tokenizer import load_tokenizer
from burnish.policy.inference.config import EngineConfig
from burnish.policy.initialize import main as initialise
from burnish.policy.training.config import TrainConfig
from burnish.policy.training.distributed import shutdown
from burnish.rollout.agents import PolicyAgent
from burnish.rollout.batch import TrainItem
from burnish.rollout.blocks import BlockError, read_block
from burnish.rollout.config import AlgoConfig, EpisodeConfig, SamplingConfig
from burnish.rollout.generator import open_engine
from burnish.rollout.layout import lay_out
from burnish.rollout.losses import check_corrections, load_loss
from burnish.rollout.settings import TrainerSettings
from burnish.rollout.token_log import TokenLog
from burnish.rollout.trainer import Trainer
from burnish.rollout.weight_sync import check_receipt, publish

NUM_ROLLOUTS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Rollouts of three turns under versions 0 and 1, with a swap while every one of them is sampling."""
    folder = tmp_path_factory.mktemp("trainer")
    initialise(InitRun(out=str(folder / "v0"), preset="tiny", seed=3))
    models = [load_policy(folder / "v0") for _ in range(2)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    refs = asyncio.run(play(folder, models[1]))
    yield folder, models, refs
    shutdown()


async def play(folder, newer):
    tokenizer = load_tokenizer(folder / "v0")
    loop = open_engine(folder / "v0", EngineConfig(deterministic=True, max_step_rows=64), "generator-0")
    agents = [
        PolicyAgent(
            attempt_id=f"a-{i}",
            conversation=Conversation(tokenizer, EncodingConfig()),
            engine=loop,
            log=TokenLog(folder / "blocks", f"a-{i}"),
            sampling=SamplingConfig(),
            budget=EpisodeConfig(max_turn_tokens=24, max_context_tokens=300),
            seed=i,
            eos=tokenizer.special.eos,
        )
        for i in range(NUM_ROLLOUTS)
    ]

    async def episode(agent, number):
        text = "write amber to out.txt then " * (number + 1)
        for turn in range(3):
            agent.hear(Message(role=Role.user, content=text if turn == 0 else f"<output>\n{'x ' * number}</output>"))
            await agent.speak(deadline=1e12)
        await agent.release()
        return agent.finish()[1]

    async def swap():
        while (await loop.stats())["sampled"] < NUM_ROLLOUTS * 34:  # in the middle of the second turn
            await asyncio.sleep(0.001)
        manifest = publish(newer.state_dict(), 1, folder / "weights")
        check_receipt(await loop.update_weights(manifest), manifest)

    *refs, _ = await asyncio.gather(*(episode(agent, i) for i, agent in enumerate(agents)), swap())
    loop.close()
    return refs


def trainer_of(folder, **changes) -> Trainer:
    settings = TrainerSettings(
        policy=str(folder / "v0"),
        blocks=str(folder / "blocks"),
        checkpoints=str(folder / "checkpoints"),
        weights=str(folder / "published"),
        train=TrainConfig(lr=1e-3, weight_decay=0.0),
        algo=AlgoConfig(),
        temperature=1.0,
        reserved_ids=(),
        max_rollout_tokens=72,
        tokens_per_micro_batch=256,
        deterministic=True,
    )
    return Trainer(replace(settings, **changes))


def only(folder, refs, version) -> list:
    """Blocks cut down to the rollouts' tokens of one version: what the trainer holding it must reproduce."""
    blocks = [[read_block(folder / "blocks", ref) for ref in rollout] for rollout in refs]
    return [sum(int((b.version_T == version).sum()) for b in rollout) for rollout in blocks]


def test_the_rollouts_mix_versions_within_one_turn(run):
    folder, _, refs = run
    assert all(only(folder, refs, 0)), "every rollout has tokens of version 0"
    assert all(only(folder, refs, 1))
    versions = [read_block(folder / "blocks", ref).version_T for rollout in refs for ref in rollout]
    assert any({0, 1} <= set(v.tolist()) for v in versions), "no turn was cut by the swap"


@pytest.mark.parametrize("is_replayed", [True, False])
@pytest.mark.parametrize("version", [0, 1])
def test_the_trainer_that_holds_a_version_reproduces_its_tokens_bit_for_bit(run, version, is_replayed):
    folder, models, refs = run
    trainer = trainer_of(folder, algo=AlgoConfig(replay_routes=is_replayed))
    trainer.model.load_state_dict(models[version].state_dict())
    micro_batches = trainer._lay_out([TrainItem(blocks=rollout, advantage=1.0) for rollout in refs])
    count = 0
    for packed in micro_batches:
        with torch.no_grad():
            scored = trainer._score(trainer.model, packed)
        mine = packed.fields["version"][scored.row] == version
        engine = packed.fields["lp_behaviour"][scored.row][mine]
        assert torch.equal(scored.logprob[mine], engine), f"{(scored.logprob[mine] - engine).abs().max():.2e}"
        count += len(engine)
    assert count == sum(only(folder, refs, version)) > 50


def test_each_sampled_token_has_loss_once_and_old_ones_none(run):
    folder, _, refs = run
    items = [TrainItem(blocks=rollout, advantage=1.0) for rollout in refs]
    tokens = [sum(ref.num_sampled for ref in rollout) for rollout in refs]
    for is_replayed in (True, False):
        step = lay_out(items, folder / "blocks", is_replayed=is_replayed)
        assert step.rollout_tokens.tolist() == tokens
        assert sum(sum(sample.loss_mask) for sample in step.samples) == sum(tokens)
    young = [replace(item, oldest_version=1) for item in items]
    step = lay_out(young, folder / "blocks", is_replayed=True)
    assert step.rollout_tokens.tolist() == only(folder, refs, 1)
    assert all(min(v for v, m in zip(s.fields["version"], s.loss_mask, strict=True) if m) == 1 for s in step.samples)
    none = lay_out([replace(items[0], oldest_version=2)], folder / "blocks", is_replayed=True)
    assert none.samples == []


def test_loss_rows_of_an_epoch_have_their_routes(run):
    folder, _, refs = run
    step = lay_out([TrainItem(blocks=refs[0], advantage=1.0)], folder / "blocks", is_replayed=True)
    assert step.routes is not None
    place = 0
    for sample in step.samples:
        mask = np.array(sample.loss_mask)
        loss_rows = place + np.flatnonzero(mask[1:])  # the row before a loss token predicts it
        assert (step.routes[loss_rows] != 0xFFFF).all()
        place += len(mask)


def test_a_step_raises_what_was_rewarded_and_is_taken_once_per_request(run):
    folder, _, refs = run
    trainer = trainer_of(folder)
    items = [TrainItem(blocks=rollout, advantage=1.0 if i < 2 else -1.0) for i, rollout in enumerate(refs)]

    def mean_logprobs() -> list[float]:
        sums, counts = torch.zeros(len(items)), torch.zeros(len(items))
        with torch.no_grad():
            for packed in trainer._lay_out(items):
                scored = trainer._score(trainer.model, packed)
                sums.index_add_(0, packed.rollout[scored.row], scored.logprob)
                counts.index_add_(0, packed.rollout[scored.row], torch.ones(len(scored.row)))
        return (sums / counts).tolist()

    before = mean_logprobs()
    result = trainer.train("step 1", items)
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    assert (result.version, result.is_skipped) == (1, False)
    after = mean_logprobs()
    assert all(after[i] > before[i] for i in (0, 1)), (before, after)
    assert all(after[i] < before[i] for i in (2, 3)), (before, after)
    assert trainer.train("step 1", items) is result, "a repeated request changes nothing"
    assert all(torch.equal(weights[name], tensor) for name, tensor in trainer.model.state_dict().items())
    assert trainer.train("step 2", items).version == 2


def test_a_block_that_was_changed_is_not_trained_on(run, tmp_path):
    folder, _, refs = run
    shutil.copytree(folder / "blocks", tmp_path / "blocks")
    path = next((tmp_path / "blocks").glob("a-1*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    trainer = trainer_of(folder, blocks=str(tmp_path / "blocks"))
    with pytest.raises(BlockError, match="a-1"):
        trainer.train("step 1", [TrainItem(blocks=rollout, advantage=1.0) for rollout in refs])
    assert trainer.version == 0


def test_a_turn_that_was_given_up_before_its_first_row_ran_breaks_no_batch(tmp_path):
    items = []
    for name, is_given_up in (("a-0", False), ("a-1", True)):
        with TokenLog(tmp_path, name) as log:
            log.open_turn(context_id="0", turn=0, start=0, input_ids=[5, 6, 7])
            log.append_sampled([8, 9], [-1.0, -1.0], [-1.0, -1.0], [0, 0])
            log.append_routes(0, np.zeros((4, 2, 1), np.uint16))
            log.seal_turn()
            if is_given_up:
                log.open_turn(context_id="0", turn=1, start=5, input_ids=[5, 6])
                log.seal_turn()
        items.append(TrainItem(blocks=tuple(log.refs), advantage=1.0))
    step = lay_out(items, tmp_path, is_replayed=True)
    assert step.rollout_tokens.tolist() == [2, 2]
    assert [len(sample.ids) for sample in step.samples] == [5, 5]
    assert step.routes is not None
    assert step.routes.shape == (10, 2, 1)


def test_the_gate_compares_tokens_of_these_very_weights_only(run):
    folder, _, refs = run
    trainer = trainer_of(folder)
    items = [TrainItem(blocks=rollout, advantage=1.0 if i < 2 else -1.0) for i, rollout in enumerate(refs)]
    # version 1 of the rollouts is not the version 1 that this trainer will make: they are of a dead driver's lineage
    found = trainer.mismatch(items)
    assert (found["mismatch_kl"], found["tokens"]) == (0.0, sum(only(folder, refs, 0)))
    assert trainer.train("step 1", items).metrics["train/mismatch_kl_fresh"] == 0.0
    foreign = [replace(item, shared_version=0) for item in items]
    assert trainer.mismatch(foreign)["tokens"] == 0
    assert "train/mismatch_kl_fresh" not in trainer.train("step 2", foreign).metrics


def test_tokens_of_a_dead_drivers_later_versions_are_as_old_as_what_its_lineage_shares_with_ours(run):
    folder, _, refs = run
    # sampled by versions up to 1; of them, this lineage has version 0 only
    for shared, oldest, is_trained in ((None, 1, True), (0, 0, True), (0, 1, False)):
        item = TrainItem(blocks=refs[0], advantage=1.0, oldest_version=oldest, shared_version=shared)
        step = lay_out([item], folder / "blocks", is_replayed=False)
        assert bool(step.rollout_tokens.sum()) == bool(step.samples) == is_trained, (shared, oldest)


def test_corrections_that_this_trainer_cannot_make_are_refused_before_a_rollout():
    for options, is_decoupled, says in (
        ({"tis_cap": 2.0}, False, "algo.decoupled=true"),
        ({"kl_coef": 0.1}, True, "no reference policy"),
        ({"entropy_coef": 0.1}, True, "the entropy has no gradient"),
    ):
        with pytest.raises(UserError, match=says):
            check_corrections(load_loss("clipped", options), is_decoupled=is_decoupled)
    check_corrections(load_loss("clipped", {"tis_cap": 2.0}), is_decoupled=True)
