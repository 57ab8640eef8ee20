"""Teachers through the cache: the right rows of the right context, one model or head at a time, and no other bytes."""

import shutil

import pytest
import torch
from distill_world import TEACHERS, teacher_of

from burnish.distill.cache import StateCache
from burnish.distill.specialist import TeacherError
from burnish.distill.teachers import Teachers, target_rows
from burnish.envs.errors import UserError
from burnish.policy.checkpoint.released import load_policy, save_policy
from burnish.policy.training.forward import hidden_of_targets, score
from burnish.policy.training.packing import Sample, batch_of


def sample(prompt: int, answer: int, first: int = 40) -> Sample:
    size = prompt + answer
    return Sample(ids=[(first + 7 * i) % 900 + 10 for i in range(size)], loss_mask=[i >= prompt for i in range(size)])


def teachers_of(world, tmp_path, names=TEACHERS, max_bytes=10**8, budget=64, **changes) -> Teachers:
    return Teachers(
        {name: teacher_of(world.folder, name, **changes) for name in names},
        StateCache(tmp_path / "states", max_bytes),
        tokens_per_micro_batch=budget,
        deterministic=True,
    )


SAMPLES = {
    "coding": [sample(20, 6), sample(9, 3, 50), sample(40, 1, 60)],
    "terminal": [sample(20, 6), sample(33, 9, 70)],
}


def test_states_are_the_teachers_own_at_the_rows_that_predict_targets(world, tmp_path):
    teachers = teachers_of(world, tmp_path)
    teachers.prepare(SAMPLES)
    for name, samples in SAMPLES.items():
        model = load_policy(world.folder / name)
        with torch.no_grad():
            alone = [hidden_of_targets(model, batch_of([s]), deterministic=True).hidden for s in samples]
            states = teachers.states(name, samples)
            assert torch.equal(states, torch.cat(alone)), name
            # what the head makes of them is what the teacher says of the very next token
            logits = states @ teachers.head(name).T
            said = torch.cat([score(model, batch_of([s])).logprob for s in samples])
        following = torch.tensor([s.ids[row + 1] for s in samples for row in target_rows(s).tolist()])
        torch.testing.assert_close(logits.log_softmax(-1).gather(1, following[:, None]).squeeze(1), said)


def test_a_teachers_score_stands_at_the_position_that_predicts():
    # a prompt of 3 tokens, an answer of 2: positions 2 and 3 predict it
    answer = Sample(ids=[5, 6, 7, 8, 9], loss_mask=[False] * 3 + [True] * 2)
    rows = target_rows(answer)
    student, teacher, signal = torch.tensor([-0.5, -1.2]), torch.tensor([-0.2, -2.0]), torch.zeros(5)
    signal[rows] = teacher - student
    assert signal.tolist() == pytest.approx([0, 0, 0.3, -0.8, 0])
    assert torch.nonzero(batch_of([answer]).loss_mask).squeeze(1).tolist() == rows.tolist() == [2, 3]
    assert target_rows(Sample(ids=[5, 6, 7, 8], loss_mask=[False] * 3 + [True])).tolist() == [2]


def test_one_model_and_then_one_head_at_a_time_each_loaded_once_a_step(world, tmp_path):
    teachers = teachers_of(world, tmp_path)
    teachers.prepare(SAMPLES)
    assert (teachers.counts.model_loads, teachers.counts.head_loads) == (2, 0)
    for name, samples in sorted(SAMPLES.items()):
        for one in samples:
            teachers.states(name, [one])
            teachers.head(name)
            assert teachers._resident[0] == name
    assert (teachers.counts.model_loads, teachers.counts.head_loads) == (2, 2)
    assert (teachers.counts.contexts, teachers.counts.cached) == (5, 0)


def test_what_is_cached_is_not_scored_again_also_after_a_restart(world, tmp_path):
    teachers_of(world, tmp_path).prepare(SAMPLES)
    again = teachers_of(world, tmp_path)
    again.prepare({"coding": SAMPLES["coding"], "terminal": [*SAMPLES["terminal"], sample(12, 4, 80)]})
    assert (again.counts.model_loads, again.counts.contexts, again.counts.cached) == (1, 6, 5)
    # the same ids under another teacher are another entry
    assert not torch.equal(
        again.states("coding", SAMPLES["coding"][:1]), again.states("terminal", SAMPLES["terminal"][:1])
    )


def test_fewer_targets_of_a_known_context_are_found_and_more_are_scored(world, tmp_path):
    whole = sample(20, 6)
    younger = Sample(ids=whole.ids, loss_mask=[i >= 23 for i in range(26)])
    teachers = teachers_of(world, tmp_path)
    teachers.prepare({"coding": [younger]})
    short = teachers.states("coding", [younger])
    teachers.prepare({"coding": [whole]})
    assert teachers.counts.model_loads == 2
    assert torch.equal(teachers.states("coding", [whole])[3:], short)
    teachers.prepare({"coding": [younger]})
    assert teachers.counts.model_loads == 2


def test_states_damaged_after_they_were_prepared_are_made_again(world, tmp_path):
    teachers = teachers_of(world, tmp_path)
    teachers.prepare(SAMPLES)
    right = teachers.states("coding", SAMPLES["coding"])
    for path in (tmp_path / "states").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert torch.equal(teachers.states("coding", SAMPLES["coding"]), right)
    assert teachers.cache.num_damaged == 3


def test_a_step_that_the_cache_cannot_hold_is_refused_before_a_teacher_is_loaded(world, tmp_path):
    teachers = teachers_of(world, tmp_path, max_bytes=4000)
    with pytest.raises(UserError, match=r"cannot hold the teachers' hidden states of one optimizer step"):
        teachers.prepare(SAMPLES)
    assert teachers.counts.model_loads == 0


@pytest.fixture
def own_world(world, tmp_path):
    """A copy of the policies that a test may change."""
    for name in TEACHERS:
        shutil.copytree(world.folder / name, tmp_path / "own" / name)
    return type(world)(tmp_path / "own", ())


def change(folder, **tensors) -> None:
    model = load_policy(folder)
    with torch.no_grad():
        for name, value in tensors.items():
            model.get_parameter(name.replace("__", ".")).mul_(value)
    save_policy(model, folder, side_files_from=folder)


def test_a_teacher_that_changes_under_the_run_is_noticed(own_world, tmp_path):
    started = teachers_of(own_world, tmp_path)
    known = started.teachers["coding"]
    started.open()
    change(own_world.folder / "coding", norm__weight=1.5)
    with pytest.raises(TeacherError, match=r"teacher coding: .* holds another .* than when the run was started"):
        started.prepare(SAMPLES)
    change(own_world.folder / "terminal", head__weight=2.0)
    with pytest.raises(TeacherError, match=r"teacher terminal: .* holds another head.weight"):
        started.head("terminal")
    resumed = Teachers({"coding": known}, started.cache, tokens_per_micro_batch=64, deterministic=True)
    with pytest.raises(TeacherError, match=r"teacher coding: .* has changed since the run was started"):
        resumed.open()


def test_states_that_are_not_finite_name_the_teacher(own_world, tmp_path):
    change(own_world.folder / "coding", norm__weight=3e38)
    teachers = teachers_of(own_world, tmp_path)
    with pytest.raises(TeacherError, match=r"teacher coding: its hidden states .* are not finite"):
        teachers.prepare(SAMPLES)


def test_a_damaged_teacher_is_named_when_the_run_starts(own_world, tmp_path):
    path = own_world.folder / "terminal" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TeacherError, match=r"teacher terminal: .*not a whole safetensors file"):
        teachers_of(own_world, tmp_path).open()
