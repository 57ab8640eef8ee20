"""The table of verbs: for each its entry point, its root dataclass and what the command line adds to plain overrides."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Verb:
    """One word of `burnish WORD`. Its YAML is configs/<name>.yaml."""

    name: str
    summary: str
    entry: str
    """`module:function`; takes the root dataclass, returns an exit code or None."""
    config: str
    """`module:Class` of the root dataclass."""
    positionals: tuple[str, ...] = ()
    """Keys that bare words fill, in order (`burnish audit RUN`)."""
    flags: dict[str, str] = field(default_factory=dict)
    """Option -> key that it fills (`--cases 'text*,quant'`)."""
    plan: str = ""
    """`module:function` from the root dataclass to what --dry-run shows beside it, as comment lines."""

    def config_class(self) -> type:
        return load(self.config)

    def plan_of(self, config: Any) -> str:
        return load(self.plan)(config)

    def entry_point(self) -> Callable[[Any], int | None]:
        return load(self.entry)


def load(path: str) -> Any:
    """Import `module:attribute`."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


# ordered as a newcomer meets them; modules are imported only when their verb runs
VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb(
            name="quickstart",
            summary="the whole pipeline with the tiny policy on this machine, with a report",
            entry="burnish.configs.pipeline:main",
            config="burnish.configs.pipeline:PipelineRun",
            plan="burnish.configs.pipeline:plan",
        ),
        Verb(
            name="pipeline",
            summary="synth, SFT, RL a domain, distillation and eval as one resumable run of a recipe",
            entry="burnish.configs.pipeline:main",
            config="burnish.configs.pipeline:PipelineRun",
            plan="burnish.configs.pipeline:plan",
        ),
        Verb(
            name="doctor",
            summary="say what this machine has of what a run needs, and what to do about the rest",
            entry="burnish.configs.doctor:main",
            config="burnish.configs.config:DoctorRun",
        ),
        Verb(
            name="synth",
            summary="synthesise agent tasks and keep those that pass the gates",
            entry="burnish.envs.synthesis.pipeline:main",
            config="burnish.envs.config:SynthRun",
        ),
        Verb(
            name="prompts",
            summary="write problems of procedural families (reasoning-gym) as a prompt file with its own scorer",
            entry="burnish.envs.prompts.generate:main",
            config="burnish.envs.prompts.config:PromptsRun",
        ),
        Verb(
            name="init",
            summary="write a policy folder with fresh weights from a preset",
            entry="burnish.policy.initialize:main",
            config="burnish.policy.config:InitRun",
        ),
        Verb(
            name="pretrain",
            summary="train a fresh policy on recall documents or plain text, before it learns any task",
            entry="burnish.sft.pretrain:main",
            config="burnish.sft.config:PretrainRun",
        ),
        Verb(
            name="sft",
            summary="train a policy on trajectories, loss on what the assistant said",
            entry="burnish.sft.train:main",
            config="burnish.sft.config:SftRun",
        ),
        Verb(
            name="rl",
            summary="let the policy act on tasks, score it and learn from it",
            entry="burnish.rollout.train:main",
            config="burnish.rollout.config:RlRun",
        ),
        Verb(
            name="distill",
            summary="let one policy learn from several specialists, on its own trajectories",
            entry="burnish.distill.train:main",
            config="burnish.distill.config:DistillRun",
        ),
        Verb(
            name="eval",
            summary="score a policy (or the oracle, or nothing) on a task set, with intervals",
            entry="burnish.rollout.evaluate:main",
            config="burnish.rollout.config:EvalRun",
        ),
        Verb(
            name="serve",
            summary="answer OpenAI chat and completion requests with a policy",
            entry="burnish.policy.inference.server:main",
            config="burnish.policy.inference.config:ServeRun",
        ),
        Verb(
            name="parity",
            summary="compare this code with golden vectors, tensor by tensor",
            entry="burnish.policy.parity:main",
            config="burnish.policy.config:ParityRun",
            positionals=("dir",),
            flags={"--cases": "cases"},
        ),
        Verb(
            name="audit",
            summary="prove that a run trained, dropped or kept every slot exactly once",
            entry="burnish.rollout.audit:main",
            config="burnish.rollout.config:AuditRun",
            positionals=("run",),
        ),
        Verb(
            name="report",
            summary="write one HTML page of a run: results, curves, slots, examples, lineage",
            entry="burnish.rollout.page.build:main",
            config="burnish.rollout.config:ReportRun",
            positionals=("run",),
        ),
        Verb(
            name="replay",
            summary="compute one trajectory of an RL run again: engine, trainer, verdict",
            entry="burnish.rollout.replay.run:main",
            config="burnish.rollout.config:ReplayRun",
            positionals=("run", "slot"),
        ),
        Verb(
            name="reap",
            summary="remove containers that dead runs left behind",
            entry="burnish.envs.sandbox.reap:main",
            config="burnish.envs.config:ReapRun",
        ),
        Verb(
            name="new",
            summary="make a task, verifier or harness that runs as it is, to be changed",
            entry="burnish.configs.scaffold:main",
            config="burnish.configs.config:NewRun",
            positionals=("kind", "name"),
        ),
    )
}
