"""The harness protocol: how a task becomes the policy's messages and the policy's words become actions.

Owns the protocol, the two actions and the import-path plug-in loader. Knows nothing of tokens: what a message is in ids
is the encoding's affair, and a harness never sees ids.
"""

import importlib
from dataclasses import dataclass
from typing import Protocol

from burnish.envs.errors import UserError
from burnish.envs.sandbox.base import ExecResult
from burnish.envs.task import Task
from burnish.policy.encoding.messages import Message

BUILT_IN = {"bash": "burnish.rollout.harness.bash:BashHarness"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run this command in the task's shell and show the policy what it printed."""

    command: str


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The policy says that it is done; the shell is not asked."""


Action = Run | Finish


class Harness(Protocol):
    """One way of putting a task to the policy. Stateless: one object serves every episode of a process."""

    def opening(self, task: Task) -> list[Message]:
        """Messages before the first assistant turn."""
        ...

    def parse(self, content: str) -> Action:
        """What an assistant turn asks for. Pure data: text of the policy is never evaluated."""
        ...

    def observe(self, result: ExecResult) -> Message:
        """The message that tells the policy what its command did."""
        ...

    def render(self, action: Action) -> str:
        """The assistant content that `parse` reads as `action`; scripted agents speak through it."""
        ...


def load_plugin(spec: str, kind: str, built_in: dict[str, str]) -> type:
    """The class or function named by a built-in name or an import path `package.module:Name`.

    Raises:
        UserError: unknown name, module that does not import, or a name the module lacks.
    """
    path = built_in.get(spec, spec)
    module_name, colon, name = path.partition(":")
    if not colon:
        known = ", ".join(sorted(built_in))
        raise UserError(f"{kind}={spec!r} is neither a built-in ({known}) nor an import path 'package.module:Name'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{kind}={spec!r}: module {module_name!r} does not import ({error})") from error
    if not hasattr(module, name):
        raise UserError(f"{kind}={spec!r}: module {module_name!r} has no {name!r}")
    return getattr(module, name)


def load_harness(spec: str) -> Harness:
    """The harness called `spec`: a built-in name (`bash`) or an import path `package.module:Class`.

    Raises:
        UserError: it cannot be loaded, or lacks a method of the protocol.
    """
    harness = load_plugin(spec, "harness", BUILT_IN)()
    missing = [name for name in ("opening", "parse", "observe", "render") if not callable(getattr(harness, name, None))]
    if missing:
        raise UserError(
            f"harness={spec!r} lacks the method(s) {', '.join(missing)} of burnish.rollout.harness.base.Harness"
        )
    return harness
