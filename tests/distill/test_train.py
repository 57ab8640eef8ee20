"""burnish distill before anything starts: what is asked for, whose tasks are whose, and the lineage."""

import shutil

import pytest

from burnish.configs.schema import compose
from burnish.distill.config import DistillRun, TeacherConfig
from burnish.distill.train import check, main, parents_of
from burnish.envs.config import SandboxKind
from burnish.envs.errors import UserError
from burnish.policy.checkpoint.lineage import policy_hash
from burnish.rollout.config import EpisodeConfig, Schedule


@pytest.fixture
def domains(make_task, tmp_path):
    """Two task sets of two tasks each."""
    folders = {}
    for domain in ("coding", "terminal"):
        for number in range(2):
            task = make_task(f"{domain}-{number}", {"instruction.md": f"Write {domain} to out.txt\n"})
            target = tmp_path / f"tasks-{domain}" / task.name
            target.parent.mkdir(exist_ok=True)
            shutil.move(task, target)
        folders[domain] = target.parent
    return folders


def run_of(world, domains, **changes) -> DistillRun:
    teachers = {
        name: TeacherConfig(policy=str(world.folder / name), tasks=str(folder), split="all")
        for name, folder in domains.items()
    }
    values = {
        "policy": str(world.folder / "student"),
        "teachers": teachers,
        "episode": EpisodeConfig(max_turns=2, max_turn_tokens=8, max_context_tokens=120),
    }
    return DistillRun(**values | changes)


def test_every_task_has_its_teacher(world, domains):
    found = check(run_of(world, domains))
    assert {task: teacher.name for task, teacher in found.teacher_of.items()} == {
        f"{name}-{number}": name for name in domains for number in range(2)
    }
    assert found.num_ids == 1024


def test_the_lineage_names_the_start_every_teacher_and_every_task_set(world, domains):
    run = run_of(world, domains)
    parents = parents_of(run, check(run))
    assert set(parents) == {"policy", "teacher.coding", "teacher.terminal", "tasks.coding", "tasks.terminal"}
    assert parents["policy"].hash == policy_hash(world.folder / "student")
    assert parents["teacher.coding"].hash == policy_hash(world.folder / "coding")


def test_one_task_set_is_shared_by_domain(world, domains, tmp_path, make_task):
    both = tmp_path / "both"
    for name in domains:
        metadata = f'\n[metadata]\ndomain = "{name}"\n'
        task = make_task(f"both-{name}")
        (task / "task.toml").write_text((task / "task.toml").read_text() + metadata)
        both.mkdir(exist_ok=True)
        shutil.move(task, both / task.name)
    teachers = {
        name: TeacherConfig(policy=str(world.folder / name), tasks=str(both), split="all", domain=name)
        for name in domains
    }
    found = check(run_of(world, domains, teachers=teachers))
    assert {task: teacher.name for task, teacher in found.teacher_of.items()} == {f"both-{n}": n for n in domains}
    teachers["coding"].domain = "cooking"
    with pytest.raises(UserError, match=r"teachers.coding: split all of .*both holds no task of domain cooking"):
        check(run_of(world, domains, teachers=teachers))


def test_mistakes_are_named_before_anything_starts(world, domains, tmp_path):
    def teachers(**changes):
        made = run_of(world, domains).teachers
        for name, values in changes.items():
            for key, value in values.items():
                setattr(made[name], key, value)
        return made

    for run, says in (
        (DistillRun(), "teachers is not set: burnish distill needs"),
        (run_of(world, domains, policy=""), "policy is not set"),
        (run_of(world, domains, policy=str(tmp_path)), "config.json"),
        (run_of(world, domains, teachers=teachers(coding={"policy": "nowhere"})), "teacher coding: .*nowhere"),
        (run_of(world, domains, teachers=teachers(coding={"split": "train"})), "no split 'train'"),
        (
            run_of(world, domains, teachers=teachers(coding={"tasks": str(domains["terminal"])})),
            "task terminal-0 is teachers.coding's and teachers.terminal's: give each its own tasks or domain",
        ),
        (run_of(world, domains, harness="nonsense"), "nonsense"),
        (run_of(world, domains, harness="answer"), "never acts in a sandbox"),
        (run_of(world, domains, verifier="nonsense", sandbox=SandboxKind.local), "verifier 'nonsense' is neither"),
        (run_of(world, domains, episode=EpisodeConfig(max_context_tokens=9)), "its prompt has .* tokens"),
        (
            run_of(world, domains, episode=EpisodeConfig(max_context_tokens=9999)),
            "more than the policy's context of 4096",
        ),
        (DistillRun(resume=str(tmp_path)), "no run of `burnish distill` there"),
    ):
        with pytest.raises((UserError, FileNotFoundError), match=says):
            main(run)


def test_two_tasks_of_one_id_are_refused(world, domains):
    shutil.copytree(domains["coding"] / "coding-0", domains["terminal"] / "coding-0")
    path = domains["terminal"] / "coding-0" / "instruction.md"
    path.write_text("Write something else to out.txt\n")
    with pytest.raises(UserError, match=r"task coding-0 is teachers.coding's and teachers.terminal's"):
        check(run_of(world, domains))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"teachers": {"Coding!": TeacherConfig(policy="p", tasks="t")}}, "a teacher's name must be of a-z"),
        (
            {"teachers": {"a": TeacherConfig(policy="p", tasks="t", weight=0.0)}},
            r"teachers.a.weight must be > 0, got 0\.0",
        ),
        ({"teachers": {"a": TeacherConfig(policy="p", tasks="t", share=-1.0)}}, "teachers.a.share must be > 0"),
        ({"schedule": Schedule.lockstep}, "set algo.max_offpolicy_steps=0"),
        ({"name": "a/b"}, "name must be a folder name"),
    ],
)
def test_settings_that_contradict_are_refused_at_compose_time(changes, says):
    with pytest.raises(ValueError, match=says):
        DistillRun(**changes)


@pytest.mark.parametrize("names", [["coding"], ["teacher_model", "teacher", "a-b_c", "0"]])
def test_as_many_teachers_are_in_the_plan_as_were_given(names):
    given = [f"teachers.{name}.{key}={name}" for name in names for key in ("policy", "tasks")]
    run = compose("distill", ["policy=p", *given])
    assert list(run.teachers) == names
    assert all(run.teachers[name].policy == name for name in names)
    with pytest.raises(UserError, match=r"teachers.x.tasks is required"):
        compose("distill", ["policy=p", *given, "teachers.x.policy=p"])
    with pytest.raises(UserError, match=r"unknown key 'teachers.x.polcy'"):
        compose("distill", ["policy=p", *given, "teachers.x.polcy=p"])
