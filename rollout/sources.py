"""What a run acts on: task folders in sandboxes, or prompts without any. Everything that differs between the two is here.

Task folders (`tasks=DIR`) have machines and hidden tests; prompts (`data.path=FILE`) are answered in one turn and scored
by a function. Order, episodes, groups, ledger and lineage are the same code for both.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from burnish.envs.config import SandboxConfig, SandboxKind
from burnish.envs.errors import UserError
from burnish.envs.prompts.config import PromptData
from burnish.envs.prompts.promptset import load_prompts
from burnish.envs.sandbox.base import SandboxFactory, open_sandboxes
from burnish.envs.task import Task
from burnish.envs.taskset import TaskSet, load_taskset
from burnish.rollout.config import UNGRADED
from burnish.rollout.harness.base import Harness, load_harness, needs_sandbox
from burnish.verifiers.config import GradingConfig
from burnish.verifiers.function import FunctionVerifier
from burnish.verifiers.reused import ReusedVerdicts
from burnish.verifiers.verifier import Verifier, load_verifier

NO_SANDBOX = "none"
"""What stands where the kind of sandbox does, for prompts."""


class Source(Protocol):
    """The settings that say what a run acts on; those of rl, eval and an episode have them."""

    @property
    def tasks(self) -> str: ...
    @property
    def data(self) -> PromptData: ...
    @property
    def harness(self) -> str: ...
    @property
    def verifier(self) -> str: ...
    @property
    def grading(self) -> GradingConfig: ...
    @property
    def sandbox(self) -> SandboxKind: ...
    @property
    def limits(self) -> SandboxConfig: ...


def acts_on_prompts(source: Source) -> bool:
    return bool(source.data.path)


def path_of(source: Source) -> str:
    """The folder or file that is acted on, for messages."""
    return source.data.path or source.tasks


def name_of(source: Source) -> str:
    """A short name of it, for folders."""
    return Path(source.data.path).stem if source.data.path else Path(source.tasks).resolve().name


def load_tasks(source: Source) -> TaskSet:
    """Reads and checks all of it.

    Raises:
        UserError: neither tasks nor data.path is given, or what is there is not what it should be.
    """
    if not path_of(source):
        raise UserError("tasks must not be empty: give tasks=DIR (task folders) or data.path=FILE (prompts)")
    return load_prompts(source.data) if acts_on_prompts(source) else load_taskset(Path(source.tasks))


def open_machines(source: Source) -> SandboxFactory | None:
    """Sandboxes for task folders; None for prompts, which have no machine: no engine is asked.

    Raises:
        SandboxUnavailable: see `open_sandboxes`.
    """
    return None if acts_on_prompts(source) else open_sandboxes(source.limits, source.sandbox)


def open_harness(source: Source) -> Harness:
    """Raises:
    UserError: no such harness, or one that does not fit what the run acts on.
    """
    harness = load_harness(source.harness)
    if acts_on_prompts(source) and needs_sandbox(harness):
        raise UserError(
            f"harness={source.harness} acts in a sandbox, and prompts have none: leave harness out, or give one with "
            f"needs_sandbox = False"
        )
    if not acts_on_prompts(source) and not needs_sandbox(harness):
        raise UserError(f"harness={source.harness} never acts in a sandbox, so hidden tests would see nothing")
    return harness


def open_verifier(source: Source, sandboxes: SandboxFactory | None) -> Verifier | None:
    """The verifier of `source`: hidden tests or a class for task folders, a function for prompts, None for UNGRADED.

    Raises:
        UserError: it does not resolve.
    """
    if source.verifier == UNGRADED:
        return None
    if sandboxes is None:
        verifier: Verifier = FunctionVerifier(source.verifier, source.grading)
    else:
        verifier = load_verifier(source.verifier, sandboxes)
    return ReusedVerdicts(verifier) if source.grading.reuse else verifier


def close_verifier(verifier: Verifier | None) -> None:
    """Ends the processes of one that has some."""
    if isinstance(verifier, ReusedVerdicts):
        verifier = verifier.verifier
    if isinstance(verifier, FunctionVerifier):
        verifier.close()


def check_verifier(source: Source, tasks: Sequence[Task], sandboxes: SandboxFactory | None) -> None:
    """In the driver, before anything starts.

    Raises:
        UserError: the verifier does not resolve, or does not get from the tasks what it needs.
    """
    verifier = open_verifier(source, sandboxes)
    try:
        real = verifier.verifier if isinstance(verifier, ReusedVerdicts) else verifier
        if isinstance(real, FunctionVerifier):
            real.check(tasks)
    finally:
        close_verifier(verifier)
