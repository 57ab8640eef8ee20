"""What the oracle did in a real shell, turn by turn, and the same as the messages that a policy is taught with."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# the turn that ends an episode of the bash harness
EXIT = "exit"


@dataclass(frozen=True, kw_only=True)
class RecordedTurn:
    """One command, with what the sandbox answered."""

    command: str
    output: str
    exit_code: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def observation(turn: RecordedTurn) -> str:
    """The user message that follows the command, as the bash harness words it."""
    tag = "<output>" if turn.exit_code == 0 else f"<output exit={turn.exit_code}>"
    return f"{tag}\n{turn.output}</output>"


def messages(instruction: str, turns: Sequence[RecordedTurn]) -> list[dict[str, str]]:
    """The whole episode as a chat: instruction, commands and observations in turn, then `exit`."""
    chat = [{"role": "user", "content": instruction.strip()}]
    for turn in turns:
        chat.append({"role": "assistant", "content": turn.command})
        chat.append({"role": "user", "content": observation(turn)})
    return [*chat, {"role": "assistant", "content": EXIT}]
