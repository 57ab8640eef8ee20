"""Each way in which a teacher is not fit to be learnt from ends in one sentence that names it."""

import json
import math
import shutil

import pytest
import torch
from distill_world import teacher_of

from burnish.distill.config import HealthConfig, TeacherConfig
from burnish.distill.health import check_evaluation, check_files, check_says
from burnish.distill.specialist import TeacherError
from burnish.policy.encoding.tokenizer import load_tokenizer

NUM_IDS = 1024


def found(world, folder, **changes):
    values = {"system_token_id": 128826, "context": 200, "health": HealthConfig()}
    config = TeacherConfig(policy=str(folder), tasks="tasks", **changes.pop("config", {}))
    return check_files("coding", config, load_tokenizer(world.folder / "student"), **values | changes)


@pytest.fixture
def own(world, tmp_path):
    shutil.copytree(world.folder / "coding", tmp_path / "own")
    return tmp_path / "own"


def edit(path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_sound_teacher_is_described(world):
    teacher = found(world, world.folder / "coding", config={"weight": 2.0})
    assert teacher == teacher_of(world.folder, "coding", weight=2.0)


def test_another_tokenizer_is_named_with_the_first_id_that_differs(world, own):
    def swap(content):
        words = content["model"]["vocab"]
        one, other = [word for word in words if word.isalpha()][:2]
        words[one], words[other] = words[other], words[one]

    edit(own / "tokenizer.json", swap)
    with pytest.raises(TeacherError, match=r"teacher coding: id \d+ is '\w+' for it and '\w+' for the student"):
        found(world, own)


def test_a_missing_folder_and_a_damaged_config_are_named(world, own, tmp_path):
    with pytest.raises(TeacherError, match=r"teacher coding: .*nowhere"):
        found(world, tmp_path / "nowhere")
    (own / "config.json").write_text("{")
    with pytest.raises(TeacherError, match=r"teacher coding: .*config.json"):
        found(world, own)


def test_a_context_that_is_too_short_is_named(world):
    with pytest.raises(TeacherError, match=r"teacher coding: its context is 4096 tokens, .* is 5000"):
        found(world, world.folder / "coding", context=5000)


def evaluation(folder, policy, rate):
    folder.mkdir()
    (folder / "conditions.json").write_text(json.dumps({"policy": policy}))
    (folder / "summary.json").write_text(json.dumps({"all": {"pass": rate}}))
    return folder


def test_a_pass_rate_below_the_bound_or_of_another_policy_is_refused(world, tmp_path):
    teacher = teacher_of(world.folder, "coding")
    check_evaluation(teacher, evaluation(tmp_path / "good", teacher.hash, 0.6), 0.6)
    with pytest.raises(TeacherError, match=r"teacher coding: .*poor: it passes 0\.500 of the tasks, .* is 0\.6"):
        check_evaluation(teacher, evaluation(tmp_path / "poor", teacher.hash, 0.5), 0.6)
    with pytest.raises(TeacherError, match=r"teacher coding: .*other is of another policy than"):
        check_evaluation(teacher, evaluation(tmp_path / "other", "0" * 64, 0.9), 0.6)
    with pytest.raises(TeacherError, match=r"teacher coding: .*make it with `burnish eval`"):
        check_evaluation(teacher, tmp_path / "none", 0.6)
    with pytest.raises(
        TeacherError, match=r"teacher coding: health.min_pass=0\.6 needs teachers.coding.evaluation=DIR"
    ):
        found(world, world.folder / "coding", health=HealthConfig(min_pass=0.6))


def says(logprobs, entropies, **bounds):
    check_says("coding", torch.tensor(logprobs), torch.tensor(entropies), NUM_IDS, HealthConfig(**bounds))


def test_what_a_sound_teacher_says_passes():
    says([-0.1, -2.0, -0.5], [0.3, 2.0, 1.0])
    says([-0.1], [0.3])  # one token has no spread


@pytest.mark.parametrize(
    ("logprobs", "entropies", "message"),
    [
        # weights lost on the way: every log-probability is -ln V
        ([-math.log(NUM_IDS)] * 3, [math.log(NUM_IDS)] * 3, "its log-probabilities hardly differ"),
        ([-6.9, -6.95, -6.92], [6.90, 6.91, 6.92], r"its entropy is 0\.997 of the uniform distribution's"),
        ([-9.0, -8.0, -7.0], [1.0, 1.0, 1.0], r"its perplexity is 2\.91 of the vocabulary's size"),
        ([-0.1, math.nan], [0.3, 0.3], "its probabilities are not finite"),
        ([-0.1, -math.inf], [0.3, 0.3], "its probabilities are not finite"),
    ],
)
def test_what_a_sick_teacher_says_is_refused(logprobs, entropies, message):
    with pytest.raises(TeacherError, match=rf"teacher coding: on the student's first \d tokens {message}"):
        says(logprobs, entropies)


def test_bounds_are_the_users():
    says([-6.9, -6.95, -6.92], [6.90, 6.91, 6.92], max_entropy_share=1.0, max_perplexity_share=1.0)
    with pytest.raises(TeacherError, match="hardly differ"):
        says([-0.1, -0.2], [0.3, 0.3], min_logprob_std=0.5)
