"""burnish distill: check what was given, then let the student act and learn from its teachers (rollout/driver.py).

Everything a user can get wrong is found here, before an actor starts; what a teacher says is looked at before the first step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from burnish.configs.schema import to_yaml
from burnish.distill.batch import form_batch
from burnish.distill.config import DistillRun, TeacherConfig
from burnish.distill.health import check_files
from burnish.distill.mixture import Domain, slots_of_pass
from burnish.distill.settings import DistillerSettings
from burnish.distill.specialist import Teacher
from burnish.envs.config import SandboxKind
from burnish.envs.errors import UserError
from burnish.envs.sandbox.base import open_sandboxes
from burnish.envs.task import Task
from burnish.envs.taskset import TaskSet, load_taskset
from burnish.policy.checkpoint.lineage import policy_hash
from burnish.policy.released_config import load_config
from burnish.rollout.config import Agent
from burnish.rollout.driver import Stage, check_policy, check_prompts, drive, schedule_of
from burnish.rollout.rollouts import effort_of
from burnish.rollout.run_folder import Parent, read_run
from burnish.rollout.settings import EpisodeSettings
from burnish.rollout.sources import check_verifier, open_harness


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What the checks found."""

    teachers: Mapping[str, Teacher]
    tasks: Mapping[str, Sequence[Task]]
    """By teacher."""
    task_sets: Mapping[str, TaskSet]
    """By folder."""
    num_ids: int
    """Ids that the student and every teacher have."""

    @property
    def teacher_of(self) -> dict[str, Teacher]:
        """Teacher by task id."""
        return {task.id: self.teachers[name] for name, mine in self.tasks.items() for task in mine}


def main(run: DistillRun) -> int:
    """Trains to the last optimizer step and writes `<run folder>/policy`."""
    is_resumed = bool(run.resume)
    if is_resumed:
        run = read_run(run, "distill")
    run_dir = Path(run.runs) / run.name
    found, settings = check(run), to_yaml(run)
    # what a teacher cannot say is not said on the way to it
    student_ids = load_config(Path(run.policy)).vocab_size
    run.engine = run.engine.reserving(range(found.num_ids, student_ids))
    domains = {
        name: Domain(task_ids=[task.id for task in tasks], share=run.teachers[name].share)
        for name, tasks in found.tasks.items()
    }
    return drive(
        Stage(
            verb="distill",
            run=run,
            pacing=run.algo,
            is_resumed=is_resumed,
            settings=settings,
            parents=parents_of(run, found),
            order=lambda number: slots_of_pass(domains, number, run.algo.group_size, effort_of(run.encoding), run.seed),
            form=partial(
                form_batch,
                teacher_of=found.teacher_of,
                max_offpolicy_steps=run.algo.max_offpolicy_steps,
                blocks=run_dir / "blocks",
            ),
            machines=lambda: sandbox_kind(run, found),
            trainer=lambda: trainer_settings(run, run_dir, found),
            episodes=lambda: episode_settings(run, found.task_sets),
            shown="train/loss",
        )
    )


def check(run: DistillRun) -> Checked:
    """Everything that can be known before a process starts.

    Raises:
        UserError, ValueError: what is wrong, and where; a TeacherError names the teacher.
    """
    for key in ("teachers", "policy"):
        if not getattr(run, key):
            raise UserError(
                f"{key} is not set: burnish distill needs policy=DIR (the student) and, for each teacher, "
                f"teachers.NAME.policy=DIR teachers.NAME.tasks=DIR; or resume=RUN"
            )
    tokenizer = check_policy(run)
    teachers = {
        name: check_files(
            name,
            config,
            tokenizer,
            system_token_id=run.encoding.system_token_id,
            context=run.episode.max_context_tokens,
            health=run.health,
        )
        for name, config in run.teachers.items()
    }
    task_sets = {config.tasks: load_taskset(Path(config.tasks)) for config in run.teachers.values()}
    tasks = {name: tasks_of(name, config, task_sets[config.tasks]) for name, config in run.teachers.items()}
    check_apart(run, tasks, task_sets)
    harness = open_harness(episode_settings(run, task_sets))
    for mine in tasks.values():
        check_prompts(run, mine, harness, tokenizer)
    sizes = [load_config(Path(run.policy)).vocab_size, *(teacher.vocab_size for teacher in teachers.values())]
    return Checked(teachers=teachers, tasks=tasks, task_sets=task_sets, num_ids=min(sizes))


def tasks_of(name: str, config: TeacherConfig, task_set: TaskSet) -> list[Task]:
    """Tasks on which the student plays for a teacher.

    Raises:
        UserError: there are none.
    """
    tasks = [
        task
        for task in task_set.split(config.split)
        if not config.domain or task.config.metadata.get("domain") == config.domain
    ]
    if not tasks:
        where = f" of domain {config.domain}" if config.domain else ""
        raise UserError(f"teachers.{name}: split {config.split} of {config.tasks} holds no task{where}")
    return tasks


def check_apart(run: DistillRun, tasks: Mapping[str, Sequence[Task]], task_sets: Mapping[str, TaskSet]) -> None:
    """A task id means one task, and a task has one teacher.

    Raises:
        UserError: naming the task and who claims it.
    """
    owner: dict[str, str] = {}
    for name, mine in tasks.items():
        for task in mine:
            if (other := owner.setdefault(task.id, name)) != name:
                raise UserError(
                    f"task {task.id} is teachers.{other}'s and teachers.{name}'s: give each its own tasks or domain"
                )
    seen: dict[str, Task] = {}
    for task_set in task_sets.values():
        for task in task_set.tasks:
            if seen.setdefault(task.id, task).content_hash != task.content_hash:
                raise UserError(
                    f"{task.path} and {seen[task.id].path} are two tasks of one id; rename one of the folders"
                )


def parents_of(run: DistillRun, found: Checked) -> dict[str, Parent]:
    """The student's start, every teacher and every task set."""
    parents = {"policy": Parent(hash=policy_hash(Path(run.policy)), path=run.policy)}
    for name, teacher in found.teachers.items():
        parents[f"teacher.{name}"] = Parent(hash=teacher.hash, path=teacher.policy)
        folder = run.teachers[name].tasks
        parents[f"tasks.{name}"] = Parent(hash=found.task_sets[folder].content_hash, path=folder)
    return parents


def sandbox_kind(run: DistillRun, found: Checked) -> SandboxKind:
    """Asked for in the driver: a missing engine is told before anything starts, and every worker gets the same kind.

    Raises:
        UserError: no engine answers, or there is no such verifier.
    """
    sandboxes = open_sandboxes(run.limits, run.sandbox)
    try:
        settings = episode_settings(run, found.task_sets)
        check_verifier(settings, [task for mine in found.tasks.values() for task in mine], sandboxes)
    finally:
        sandboxes.close()
    return sandboxes.kind


def trainer_settings(run: DistillRun, run_dir: Path, found: Checked) -> DistillerSettings:
    return DistillerSettings(
        stage="distill",
        policy=run.policy,
        blocks=str(run_dir / "blocks"),
        checkpoints=str(run_dir / "checkpoints"),
        weights=str(run_dir / "weights"),
        train=schedule_of(run),
        temperature=run.sampling.temperature,
        reserved_ids=tuple(run.engine.reserved_ids),
        tokens_per_micro_batch=run.tokens_per_micro_batch,
        deterministic=run.engine.deterministic,
        algo=run.algo,
        teachers=found.teachers,
        health=run.health,
        cache=str(run_dir / "teacher-states"),
        cache_bytes=int(run.cache.max_gib * 2**30),
        num_ids=found.num_ids,
    )


def episode_settings(run: DistillRun, task_sets: Iterable[str]) -> EpisodeSettings:
    """What the episodes are told.

    Args:
        task_sets: folders.
    """
    first, *others = task_sets
    return EpisodeSettings(
        run_id=run.name,
        agent=Agent.policy,
        tasks=first,
        further_tasks=tuple(others),
        policy=run.policy,
        blocks=str(Path(run.runs) / run.name / "blocks"),
        harness=run.harness,
        verifier=run.verifier,
        sandbox=run.sandbox,
        limits=run.limits,
        episode=run.episode,
        encoding=run.encoding,
        sampling=run.sampling,
        seed=run.seed,
        concurrency=run.cluster.episodes_per_worker,
        grading=run.grading,
    )
