"""The harness protocol: how a task becomes the policy's messages and the policy's words become actions.

Owns the protocol, the two actions and finding a harness by name or import path. Knows nothing of tokens: what a message is in ids
is the encoding's affair, and a harness never sees ids.
"""

from dataclasses import dataclass
from typing import Protocol

from burnish.envs.errors import UserError
from burnish.envs.sandbox.base import ExecResult
from burnish.envs.task import Task
from burnish.policy.encoding.messages import Message
from burnish.rollout.plugins import resolve

# by import path: the built-ins import this module
BUILT_IN = {
    "bash": "burnish.rollout.harness.bash:BashHarness",
    "answer": "burnish.rollout.harness.answer:AnswerHarness",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run this command in the task's shell and show the policy what it printed."""

    command: str


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The policy says that it is done; the shell is not asked."""


Action = Run | Finish


class Harness(Protocol):
    """One way of putting a task to the policy. Stateless: one object serves every episode of a process.

    One that never runs a command says `needs_sandbox = False`: then no sandbox is opened, and the last thing the policy
    said is what is graded.
    """

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


def needs_sandbox(harness: Harness) -> bool:
    """Whether its episodes have a machine."""
    return getattr(harness, "needs_sandbox", True)


def load_harness(spec: str) -> Harness:
    """The harness called `spec`: a built-in name (`bash`, `answer`) or an import path `package.module:Class`.

    Raises:
        UserError: it cannot be loaded, or lacks a method of the protocol.
    """
    if ":" not in spec and spec not in BUILT_IN:
        names = ", ".join(sorted(BUILT_IN))
        raise UserError(f"harness={spec!r}: expected one of {names}, or an import path package.module:Class")
    harness = resolve(BUILT_IN.get(spec, spec), {}, "harness")()
    missing = [name for name in ("opening", "parse", "observe", "render") if not callable(getattr(harness, name, None))]
    if missing:
        raise UserError(
            f"harness={spec!r} lacks the method(s) {', '.join(missing)} of burnish.rollout.harness.base.Harness"
        )
    return harness
