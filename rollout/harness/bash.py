"""The bash harness: an assistant turn is shell text, run verbatim; the next user turn is what the terminal showed.

Free text: no grammar, no menu of commands. The one reserved turn is `exit` on a line of its own, which ends the episode.
"""

from burnish.envs.sandbox.base import ExecResult
from burnish.envs.task import Task
from burnish.policy.encoding.messages import Message, Role
from burnish.rollout.harness.base import Action, Finish, Run

EXIT = "exit"
# characters of one output shown to the policy; the sandbox has its own, larger cap
MAX_OUTPUT_CHARS = 4_000


def clip_output(output: str, limit: int) -> str:
    """Head and tail of a long output, with the number of characters left out between them."""
    if len(output) <= limit:
        return output
    head = limit // 2
    tail = limit - head
    return f"{output[:head]}\n[{len(output) - limit} characters omitted]\n{output[-tail:]}"


class BashHarness:
    """Terminal tasks: a persistent shell, one command block a turn."""

    def opening(self, task: Task) -> list[Message]:
        return [Message(role=Role.user, content=task.instruction.strip())]

    def parse(self, content: str) -> Action:
        return Finish() if content.strip() == EXIT else Run(command=content)

    def observe(self, result: ExecResult) -> Message:
        if result.timed_out:
            tag = "<output timeout>"
        elif result.exit_code == 0:
            tag = "<output>"
        else:
            tag = f"<output exit={result.exit_code}>"
        return Message(role=Role.user, content=f"{tag}\n{clip_output(result.output, MAX_OUTPUT_CHARS)}</output>")

    def render(self, action: Action) -> str:
        return EXIT if isinstance(action, Finish) else action.command
