"""The answer harness: a prompt is asked, and the first assistant turn is the answer. No sandbox, no second turn."""

from burnish.envs.prompts.promptset import Prompt
from burnish.envs.sandbox.base import ExecResult
from burnish.envs.task import Task
from burnish.policy.encoding.messages import Message, messages_from_openai
from burnish.rollout.harness.base import Action, Finish, Run
from burnish.rollout.types import HarnessError


class AnswerHarness:
    """Single-turn prompts: whatever the policy says is graded as it stands."""

    needs_sandbox = False

    def opening(self, task: Task) -> list[Message]:
        if not isinstance(task, Prompt):
            raise HarnessError(f"{task.where} is a task folder; harness=answer asks prompts")
        return messages_from_openai(task.messages)

    def parse(self, content: str) -> Action:
        return Finish()

    def observe(self, result: ExecResult) -> Message:
        raise HarnessError("harness=answer runs no command, so it has nothing to show")

    def render(self, action: Action) -> str:
        return action.command if isinstance(action, Run) else ""
