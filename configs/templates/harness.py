"""The harness NewHarness: one bash block a turn, DONE at the end, and the rules in the first message.

Use it as `harness=burnish.configs.templates.harness:NewHarness`, with this folder on PYTHONPATH.
"""

import re

from burnish.envs.sandbox.base import ExecResult
from burnish.envs.task import Task
from burnish.policy.encoding.messages import Message, Role
from burnish.rollout.harness.base import Action, Finish, Run

RULES = "Answer with one ```bash block; what it prints is the next message. Answer DONE when the task is solved."
DONE = "DONE"
BLOCK = re.compile(r"```(?:bash|sh)?\n(?P<command>.*)\n```", re.DOTALL)


class NewHarness:
    """Stateless: one object serves every episode of a process."""

    def opening(self, task: Task) -> list[Message]:
        """Messages before the first assistant turn."""
        return [Message(role=Role.user, content=f"{task.instruction.strip()}\n\n{RULES}")]

    def parse(self, content: str) -> Action:
        """What an assistant turn asks for. Text of the policy is data: it is never evaluated here."""
        if content.strip() == DONE:
            return Finish()
        found = BLOCK.search(content)
        # without a block the shell gets the words as they are, and its answer tells the policy so
        return Run(command=found["command"] if found else content)

    def observe(self, result: ExecResult) -> Message:
        """The message that tells the policy what its command did."""
        if result.timed_out:
            ending = "(stopped: it took too long)"
        else:
            ending = "" if result.exit_code == 0 else f"(exit code {result.exit_code})"
        return Message(role=Role.user, content=f"{result.output}{ending}")

    def render(self, action: Action) -> str:
        """The assistant content that `parse` reads as `action`: scripted agents speak through it."""
        return DONE if isinstance(action, Finish) else f"```bash\n{action.command}\n```"
