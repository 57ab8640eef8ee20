"""The distiller on the student's own blocks: the dense gradient, one denominator, bounded ages, exact states, and a step."""

from dataclasses import replace

import pytest
import torch
from distill_world import NUM_ROLLOUTS, TEACHERS, teacher_of

from burnish.distill.batch import DistillItem
from burnish.distill.config import DistillAlgoConfig, HealthConfig
from burnish.distill.objective import StepWeights
from burnish.distill.specialist import TeacherError
from burnish.distill.teachers import target_rows
from burnish.distill.trainer import Distiller
from burnish.envs.errors import UserError
from burnish.kernels.kl.reference import dense_divergence_ref
from burnish.kernels.testing import error_ratio
from burnish.policy.checkpoint.released import load_policy, save_policy
from burnish.policy.model.graph_store import GraphStore
from burnish.policy.model.rows import plain_rows
from burnish.policy.training.distributed import shutdown
from burnish.rollout.blocks import read_block
from burnish.rollout.weight_sync import checksums, digest_of


@pytest.fixture(autouse=True)
def no_process_group_is_left():
    yield
    shutdown()


def items_of(world, **changes) -> list[DistillItem]:
    return [
        DistillItem(blocks=blocks, teacher=TEACHERS[number % 2], **changes)
        for number, blocks in enumerate(world.rollouts)
    ]


def distiller_of(world, tmp_path, **changes) -> Distiller:
    own = {"checkpoints": str(tmp_path / "checkpoints"), "cache": str(tmp_path / "states")}
    return Distiller(world.settings(**own | changes))


def gradients_of(distiller: Distiller, items) -> list[torch.Tensor]:
    """Of the step's loss, as TrainStep sums it up over micro-batches."""
    step = distiller.read_items(items)
    samples = {name: [s for s in step.samples if items[s.rollout].teacher == name] for name in TEACHERS}
    distiller.teachers.prepare(samples)
    weight = torch.tensor([distiller.settings.teachers[item.teacher].weight for item in items])
    weights = StepWeights.of(weight, step.rollout_tokens, distiller.settings.algo.reduction)
    parameters = list(distiller.model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for name, mine in samples.items():
        for batch in distiller._batches(name, mine):
            loss = distiller._loss(distiller.forward(distiller.model, batch), batch, weights, distiller.version).loss
            for sums, part in zip(total, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
                if part is not None:
                    sums += part
    return [sums / weights.denominator for sums in total]


def dense_gradients(world, items, algo, weight_of) -> tuple[float, list[torch.Tensor]]:
    """The same by autograd alone: every context on its own, all logits of student and teacher at once."""
    student = load_policy(world.folder / "student")
    teachers = {name: load_policy(world.folder / name) for name in TEACHERS}
    never = torch.zeros(1024, dtype=torch.bool)
    never[student.config.placeholder_ids] = True

    def logits(model, ids):
        rows = plain_rows([ids])
        out = model(rows, GraphStore(model.config, rows), deterministic=True)
        return model.logits(out.hidden, deterministic=True)

    sums, denominator = [], 0.0
    for item in items:
        blocks = [read_block(world.folder / "blocks", ref) for ref in item.blocks]
        ids = [int(i) for block in blocks for i in block.ids_T]
        mask = torch.tensor([bool(s) for block in blocks for s in block.sampled_T])
        rows = torch.nonzero(mask[1:]).squeeze(1)
        with torch.no_grad():
            other = logits(teachers[item.teacher], ids)[rows]
        value = dense_divergence_ref(
            logits(student, ids)[rows], other, beta=algo.beta, temperature=algo.temperature, excluded=never
        ).sum()
        scale = weight_of[item.teacher] / (len(rows) if algo.reduction == "rollout_mean" else 1)
        sums.append(scale * value)
        denominator += scale * len(rows)
    loss = torch.stack(sums).sum() / denominator
    found = torch.autograd.grad(loss, list(student.parameters()), allow_unused=True)
    return loss.item(), [
        torch.zeros_like(p) if g is None else g for p, g in zip(student.parameters(), found, strict=True)
    ]


@pytest.mark.parametrize("options", [{}, {"reduction": "rollout_mean", "temperature": 0.8, "vocabulary_chunk": 100}])
def test_loss_and_gradient_of_all_weights_are_the_dense_ones_however_the_step_is_packed(world, tmp_path, options):
    algo, items = DistillAlgoConfig(**options), items_of(world)
    weighted = {"coding": 1.0, "terminal": 2.5}
    teachers = {name: teacher_of(world.folder, name, weight=weighted[name]) for name in TEACHERS}
    loss, right = dense_gradients(world, items, algo, weighted)
    for budget in (32, 100, 10_000):
        distiller = distiller_of(world, tmp_path, algo=algo, teachers=teachers, tokens_per_micro_batch=budget)
        got = gradients_of(distiller, items)
        flat = [torch.cat([g.flatten() for g in gs]) for gs in (got, right)]
        assert error_ratio(*flat) < 2e-6, budget
        done = distiller.take(items)
        assert done.metrics["train/loss"] == pytest.approx(loss, rel=1e-6), budget
        assert len(done.micro_batches) >= (4 if budget == 32 else 2)
        shutdown()


def test_a_step_moves_the_student_to_its_teachers_and_is_taken_once_a_request(world, tmp_path):
    distiller, items = distiller_of(world, tmp_path), items_of(world)
    first = distiller.train("step 1", items)
    weights = digest_of(checksums(distiller.model.state_dict().items()))
    assert (first.version, first.is_skipped) == (1, False)
    assert distiller.train("step 1", items) is first
    assert digest_of(checksums(distiller.model.state_dict().items())) == weights
    losses = [first.metrics["distill/kl"]]
    for step in range(2, 7):
        losses.append(distiller.train(f"step {step}", items).metrics["distill/kl"])
    assert losses == sorted(losses, reverse=True), losses
    assert losses[-1] < 0.7 * losses[0], losses
    assert first.metrics["train/slots"] == NUM_ROLLOUTS
    assert sum(first.trained_tokens) == sum(ref.num_sampled for blocks in world.rollouts for ref in blocks)


def test_every_sampled_token_has_its_target_row_the_end_of_a_turn_too(world, tmp_path):
    distiller, items = distiller_of(world, tmp_path), items_of(world)
    step = distiller.read_items(items)
    eos, ended = distiller.model.config.eos_token_id, 0
    for sample in step.samples:
        rows = target_rows(sample)
        ended += sum(sample.ids[row + 1] == eos for row in rows.tolist())
        assert len(rows) == sum(sample.loss_mask)
    sampled = [read_block(world.folder / "blocks", ref) for blocks in world.rollouts for ref in blocks]
    assert ended == sum(int((b.ids_T[b.sampled_T] == eos).sum()) for b in sampled)


def test_scoring_leaves_the_student_alone_and_the_gate_is_the_students(world, tmp_path):
    distiller, items = distiller_of(world, tmp_path), items_of(world)
    before = digest_of(checksums(distiller.model.state_dict().items()))
    step = distiller.read_items(items)
    distiller.teachers.prepare({"coding": step.samples})
    assert digest_of(checksums(distiller.model.state_dict().items())) == before
    # the very weights that sampled: engine and trainer agree bit for bit, whatever the teachers said
    found = distiller.mismatch(items)
    assert (found["mismatch_kl"], found["max_abs_lp"]) == (0.0, 0.0)
    assert found["tokens"] == sum(ref.num_sampled for blocks in world.rollouts for ref in blocks)
    assert distiller.take(items).metrics["train/mismatch_kl_fresh"] < 1e-10


def test_what_a_teacher_says_does_not_depend_on_sampling(world, tmp_path):
    said = []
    for number, temperature in enumerate((1.0, 0.3)):
        distiller = distiller_of(world, tmp_path, temperature=temperature, cache=str(tmp_path / f"states-{number}"))
        done = distiller.take(items_of(world))
        said.append([done.metrics[f"distill/{name}/{what}"] for name in TEACHERS for what in ("kl", "entropy")])
        assert ("train/mismatch_kl_fresh" in done.metrics) == (temperature == 1.0)
        shutdown()
    assert said[0] == said[1]


def test_each_teacher_is_loaded_once_and_not_at_all_when_its_states_are_known(world, tmp_path):
    distiller, items = distiller_of(world, tmp_path, tokens_per_micro_batch=32), items_of(world)
    first = distiller.take(items).metrics
    again = distiller.take(items).metrics
    assert (first["distill/model_loads"], first["distill/cached_share"]) == (2, 0)
    assert (again["distill/model_loads"], again["distill/head_loads"], again["distill/cached_share"]) == (0, 2, 1)


def test_old_tokens_are_masked_and_ages_are_reported(world, tmp_path):
    distiller = distiller_of(world, tmp_path)
    done = distiller.train("step 1", items_of(world))
    assert (done.metrics["distill/age"], done.metrics["distill/age_max"]) == (0, 0)
    done = distiller.train("step 2", items_of(world))
    assert (done.metrics["distill/age"], done.metrics["distill/age_max"]) == (1, 1)
    assert "train/mismatch_kl_fresh" not in done.metrics
    old, *young = items_of(world)
    done = distiller.train("step 3", [replace(old, oldest_version=1), *young])
    assert done.trained_tokens[0] == 0
    assert all(done.trained_tokens[1:])
    with pytest.raises(ValueError, match="the step has no loss tokens"):
        distiller.train("step 4", items_of(world, oldest_version=1))


def test_a_saved_state_goes_on_bit_for_bit_with_and_without_the_cache(world, tmp_path):
    items = items_of(world)
    distiller = distiller_of(world, tmp_path)
    distiller.train("step 1", items)
    distiller.save()
    right = distiller.train("step 2", items)
    weights = digest_of(checksums(distiller.model.state_dict().items()))
    for cache in (tmp_path / "states", tmp_path / "no-states"):
        shutdown()
        resumed = distiller_of(world, tmp_path, cache=str(cache))
        assert resumed.load() == 1
        assert resumed.train("step 2", items).metrics["train/loss"] == right.metrics["train/loss"]
        assert digest_of(checksums(resumed.model.state_dict().items())) == weights


def test_a_teacher_that_lost_its_weights_is_refused_before_the_first_step(world, tmp_path):
    model = load_policy(world.folder / "terminal")
    with torch.no_grad():
        model.head.weight.zero_()
    save_policy(model, tmp_path / "uniform", side_files_from=world.folder / "terminal")
    teachers = {"coding": teacher_of(world.folder, "coding"), "terminal": teacher_of(tmp_path, "uniform")}
    teachers["terminal"] = replace(teachers["terminal"], name="terminal")
    distiller = distiller_of(world, tmp_path, teachers=teachers)
    before = digest_of(checksums(distiller.model.state_dict().items()))
    with pytest.raises(TeacherError, match=r"teacher terminal: .* its log-probabilities hardly differ .* mean -6\.9"):
        distiller.train("step 1", items_of(world))
    assert distiller.version == 0
    assert digest_of(checksums(distiller.model.state_dict().items())) == before
    # with that check off its entropy gives it away
    distiller.settings = replace(distiller.settings, health=HealthConfig(min_logprob_std=0.0))
    with pytest.raises(TeacherError, match=r"teacher terminal: .* its entropy is 1\.000 of the uniform"):
        distiller.train("step 1", items_of(world))


def test_a_cache_that_cannot_hold_a_step_says_so_and_trains_nothing(world, tmp_path):
    distiller = distiller_of(world, tmp_path, cache_bytes=10_000)
    with pytest.raises(UserError, match=r"cache.max_gib=.* cannot hold"):
        distiller.train("step 1", items_of(world))
    assert distiller.version == 0


def test_the_policy_says_what_it_comes_from(world, tmp_path):
    import json

    distiller = distiller_of(world, tmp_path)
    parents = {"policy": "0", "teacher.coding": "1", "teacher.terminal": "2", "tasks.coding": "3"}
    folder = distiller.export(str(tmp_path / "policy"), parents)
    lineage = json.loads((tmp_path / "policy" / "burnish.json").read_text())
    assert (lineage["stage"], lineage["parents"], lineage["preset"]) == ("distill", parents, "tiny")
    assert load_policy(folder).config == distiller.model.config
