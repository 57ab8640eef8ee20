"""burnish pipeline: synth -> fresh policy -> SFT -> RL per domain -> distill -> eval, as one resumable run.

Each stage is the verb of its name in a process of its own, with its own resume; a stage that is done is not done again.
The same command after a kill goes on where it stopped. Settings of every stage are checked before the first one starts.
`burnish quickstart` is the recipe of that name.
"""

import dataclasses
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from omegaconf import MISSING

from burnish.configs.stages import BudgetError, History, Stage, StageError, alone, run_stage
from burnish.distill.config import DistillRun, TeacherConfig
from burnish.envs.config import Domain, SandboxKind, SynthRun, require
from burnish.envs.errors import UserError
from burnish.envs.synthesis.generate import families_of
from burnish.policy.config import InitRun
from burnish.rollout.config import EvalRun, RlRun
from burnish.sft.config import SftRun

logger = logging.getLogger(__name__)

GIB = 2**30
VERBS = {"synth", "init", "sft", "rl", "distill", "eval"}


@dataclasses.dataclass(kw_only=True)
class BudgetConfig:
    """What a pipeline may use; 0 is no limit. It ends with exit code 1 at a limit, and the same command goes on."""

    minutes: float = 0.0
    """Time of all stages together, over all tries."""
    disk_gib: float = 0.0
    """Size of the run folder; as much must be free at the start."""
    expected_minutes: dict[str, float] = dataclasses.field(default_factory=dict)
    """Verb -> minutes of one such stage, as measured; shown by --dry-run."""

    def __post_init__(self) -> None:
        for name in ("minutes", "disk_gib"):
            require(f"budget.{name}", getattr(self, name), getattr(self, name) >= 0, ">= 0")


@dataclasses.dataclass(kw_only=True)
class PipelineRun:
    """burnish pipeline: the main job. Each part holds the settings of a verb; what depends on the domain is filled in."""

    name: str = "pipeline"
    """Folder of the run under `runs`; the same command goes on with it."""
    runs: str = "runs"
    """Where run folders lie."""
    seed: int = 0
    """Of tasks, weights, data order and every sampled token."""
    sandbox: SandboxKind = SandboxKind.auto
    """auto | docker | local, for every stage."""
    domains: list[Domain] = dataclasses.field(default_factory=lambda: [Domain.terminal])
    """Each gets tasks and a specialist of its own; with more than one, the specialists are distilled into one policy."""
    budget: BudgetConfig = dataclasses.field(default_factory=BudgetConfig)
    synth: SynthRun = MISSING
    """Settings of `burnish synth`; `out` holds one task set a domain."""
    init: InitRun = MISSING
    """Settings of `burnish init`."""
    sft: SftRun = MISSING
    """Settings of `burnish sft`; data.path and data.validation_path name a file of every task set."""
    rl: RlRun = MISSING
    """Settings of `burnish rl`."""
    distill: DistillRun = MISSING
    """Settings of `burnish distill`."""
    eval: EvalRun = MISSING
    """Settings of `burnish eval`."""

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..") or "/" in self.name:
            raise UserError(f"name must be a folder name without '/', got {self.name!r}")
        if not self.domains or len(set(self.domains)) != len(self.domains):
            raise UserError(f"domains must name at least one domain, each once, got {[str(d) for d in self.domains]}")
        families = {domain: self.families(domain) for domain in self.domains}
        for family in self.synth.families:
            if not any(family in names for names in families.values()):
                raise UserError(f"synth.families: no domain of {', '.join(families)} has a family {family!r}")
        # later stages look for what these leave in the run's own folder
        for stage, part in (("sft", self.sft), ("rl", self.rl), ("distill", self.distill)):
            if (part.runs, part.name) != (f"{self.runs}/{self.name}", stage):
                raise UserError(f"{stage}.runs and {stage}.name are the pipeline's own: set runs and name instead")
        own = {"rl.tasks": self.rl.tasks, "rl.policy": self.rl.policy, "eval.tasks": self.eval.tasks,
               "distill.policy": self.distill.policy, "distill.teachers": self.distill.teachers}  # fmt: skip
        for key, value in own.items():
            if value:
                raise UserError(f"{key} is filled in by the pipeline: leave it out")
        unknown = sorted(set(self.budget.expected_minutes) - VERBS)
        if unknown:
            raise UserError(f"budget.expected_minutes: no stage of a pipeline is a {unknown[0]!r}")

    @property
    def folder(self) -> Path:
        return Path(self.runs) / self.name

    def families(self, domain: Domain) -> list[str]:
        """Of synth.families, those of one domain; a domain of which none is named has all of its own."""
        return [family for family in self.synth.families if family in families_of(domain)]


def main(run: PipelineRun) -> int:
    """Run what is left of the pipeline and write the report."""
    # imported here: the command line lists this verb without loading torch
    from burnish.configs.lineage import Lineage
    from burnish.rollout.container_events import ContainerEvents, count_containers
    from burnish.rollout.report import ReportInputs, write_report

    run_dir, stages = run.folder, stages_of(run)
    markers = run_dir / "stages"
    markers.mkdir(parents=True, exist_ok=True)
    check_room(run)
    history, lineage = History(markers / "attempts.jsonl"), Lineage(run_dir / "manifest.json", markers)
    with alone(markers / "lock") as lock:
        try:
            with ContainerEvents(run_dir / "containers.jsonl", run.rl.limits.engine_url):
                for stage in stages:
                    code = run_stage(stage, markers, history, lock, lambda: excess(run, history))
                    if code:
                        return code
                    lineage.add(stage)
        except (StageError, BudgetError) as error:
            logger.error("Stopped: %s. The same command goes on", error)
            return 1
        inputs = ReportInputs(
            evals=evaluations_of(run),
            sft=run_dir / "sft",
            acting=[run_dir / stage.config.name for stage in stages if stage.verb in ("rl", "distill")],
            containers=count_containers(run_dir / "containers.jsonl", history.drivers()),
            seconds=history.seconds(),
            seed=run.seed,
        )
        write_report(inputs, run_dir / "report")
    logger.info("Report: %s (summary.json, table.md, curves.png); `burnish report %s` makes a page of it",
                run_dir / "report", run_dir)  # fmt: skip
    return 0


def stages_of(run: PipelineRun) -> list[Stage]:
    """The stages in order."""
    run_dir = run.folder
    base, taught, distilled = Path(run.init.out), run_dir / "sft" / "policy", run_dir / "distill" / "policy"
    tasks = {domain: Path(run.synth.out) / str(domain) for domain in run.domains}
    special = {domain: run_dir / f"rl-{domain}" / "policy" for domain in run.domains}

    def evaluate(name: str, policy: Path, domain: Domain) -> Stage:
        out = run_dir / "eval" / f"{name}-{domain}"
        config = dataclasses.replace(run.eval, tasks=str(tasks[domain]), policy=str(policy), out=str(out), stage=name)
        inputs = (tasks[domain] / "taskset.json", policy / "model.safetensors")
        return Stage(name=f"eval-{name}-{domain}", verb="eval", config=config, done=out / "summary.json", inputs=inputs)

    def reinforce(domain: Domain) -> Stage:
        config = dataclasses.replace(run.rl, tasks=str(tasks[domain]), policy=str(taught), name=f"rl-{domain}")
        inputs = (tasks[domain] / "taskset.json", taught / "model.safetensors")
        done = special[domain] / "model.safetensors"
        return Stage(name=f"rl-{domain}", verb="rl", config=config, done=done, inputs=inputs)

    synths = [
        Stage(
            name=f"synth-{domain}",
            verb="synth",
            config=dataclasses.replace(run.synth, domain=domain, families=run.families(domain), out=str(tasks[domain])),
            done=tasks[domain] / "taskset.json",
        )
        for domain in run.domains
    ]
    return [
        *synths,
        Stage(name="init", verb="init", config=run.init, done=base / "model.safetensors"),
        *(evaluate("base", base, domain) for domain in run.domains),
        imitate(run, list(tasks.values()), base, taught),
        *(evaluate("sft", taught, domain) for domain in run.domains),
        *(reinforce(domain) for domain in run.domains),
        *(evaluate("rl", special[domain], domain) for domain in run.domains),
        *([join(run, tasks, special, taught, distilled)] if len(run.domains) > 1 else []),
        *(evaluate("distill", distilled, domain) for domain in run.domains if len(run.domains) > 1),
    ]


def imitate(run: PipelineRun, tasks: Sequence[Path], base: Path, taught: Path) -> Stage:
    """SFT on the transcripts of every domain."""
    names = run.sft.data
    shown = [str(folder / names.path) for folder in tasks]
    scored = [str(folder / names.validation_path) for folder in tasks] if names.validation_path else [""]
    data = dataclasses.replace(
        names, path=shown[0], more=shown[1:], validation_path=scored[0], validation_more=scored[1:]
    )
    inputs = (*(folder / "taskset.json" for folder in tasks), base / "model.safetensors")
    config = dataclasses.replace(run.sft, data=data)
    return Stage(name="sft", verb="sft", config=config, done=taught / "model.safetensors", inputs=inputs)


def join(
    run: PipelineRun, tasks: dict[Domain, Path], special: dict[Domain, Path], taught: Path, distilled: Path
) -> Stage:
    """Distillation of the specialists into the policy that they all started from."""
    teachers = {
        str(domain): TeacherConfig(
            policy=str(special[domain]),
            tasks=str(tasks[domain]),
            evaluation=str(run.folder / "eval" / f"rl-{domain}"),
        )
        for domain in run.domains
    }
    config = dataclasses.replace(run.distill, policy=str(taught), teachers=teachers)
    weights = (taught, *special.values())
    inputs = (*(folder / "taskset.json" for folder in tasks.values()), *(w / "model.safetensors" for w in weights))
    return Stage(name="distill", verb="distill", config=config, done=distilled / "model.safetensors", inputs=inputs)


def evaluations_of(run: PipelineRun) -> dict[str, dict[str, Path]]:
    """Stage -> domain -> folder of its evaluation."""
    found: dict[str, dict[str, Path]] = {}
    for stage in stages_of(run):
        if stage.verb == "eval":
            out = Path(stage.config.out)
            found.setdefault(stage.config.stage, {})[out.name.removeprefix(f"{stage.config.stage}-")] = out
    return found


def check_room(run: PipelineRun) -> None:
    """Raises:
    UserError: the disk cannot hold what the budget allows.
    """
    free = shutil.disk_usage(run.folder).free
    left = run.budget.disk_gib * GIB - size_of(run.folder)
    if run.budget.disk_gib and free < left:
        raise UserError(
            f"{run.folder}: {free / GIB:.1f} GiB are free, budget.disk_gib={run.budget.disk_gib:g} may take "
            f"{left / GIB:.1f} more: make room, or choose another runs="
        )


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder; one that goes away meanwhile counts nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size
        except FileNotFoundError:
            continue
    return total


def excess(run: PipelineRun, history: History) -> str:
    """Which budget is used up, as a sentence; empty while none is."""
    minutes = history.seconds(with_running=True) / 60
    if run.budget.minutes and minutes > run.budget.minutes:
        return f"{minutes:.1f} minutes are used, budget.minutes is {run.budget.minutes:g}"
    if run.budget.disk_gib and (used := size_of(run.folder) / GIB) > run.budget.disk_gib:
        return f"{run.folder} takes {used:.2f} GiB, budget.disk_gib is {run.budget.disk_gib:g}"
    return ""


def plan(run: PipelineRun) -> str:
    """What --dry-run shows beside the settings: the stages, what is done of them, and the budgets."""
    markers, expected = run.folder / "stages", run.budget.expected_minutes
    lines, total = [], 0.0
    for stage in stages_of(run):
        is_done = stage.is_done(markers)
        minutes = expected.get(stage.verb, 0.0)
        total += 0.0 if is_done else minutes
        cost = "done" if is_done else f"{minutes:5.1f} min" if stage.verb in expected else "    ? min"
        lines.append(f"#   {stage.name:<24} {cost:>9}  -> {stage.done}")
    where = next(path for path in (run.folder, *run.folder.parents) if path.exists())
    free = shutil.disk_usage(where).free / GIB
    limits = (
        f"# time: about {total:.0f} min expected, budget {run.budget.minutes:g} min; "
        f"disk: budget {run.budget.disk_gib:g} GiB, {free:.1f} GiB free at {where}"
    )
    return "\n".join([f"# stages of {run.folder}", *lines, limits.replace("budget 0 ", "no budget in ")])
