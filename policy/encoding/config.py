"""Settings of the chat encoding: thinking, effort, what happens to earlier reasoning. Torch-free."""

from dataclasses import dataclass
from enum import StrEnum

NAMED_EFFORTS = {"low": 50, "high": 75, "max": 100}
DEFAULT_EFFORT = "high"


class History(StrEnum):
    """What happens to the reasoning of turns before the last user turn when no tools are present."""

    drop = "drop"
    keep = "keep"


@dataclass(kw_only=True)
class EncodingConfig:
    """How messages become token ids."""

    thinking: bool = False
    """The assistant reasons before it answers; off renders every assistant header with </think> (chat mode)."""
    effort: str = DEFAULT_EFFORT
    """Reasoning effort in thinking mode: low (50), high (75), max (100) or an integer 1-100."""
    history: History = History.keep
    """Reasoning of earlier turns: `keep` (append-only, what RL needs) or `drop` (the release's default for chat
    without tools; a conversation then opens a new context at every user turn)."""
    system_token_id: int = 128826
    """Id that is relabelled to <|System|> where the tokenizer has no such token (the V4 file does not)."""

    def __post_init__(self) -> None:
        resolve_effort(self.effort)
        if self.system_token_id < 0:
            raise ValueError(f"encoding.system_token_id must be >= 0, got {self.system_token_id}")


def resolve_effort(effort: int | str | None) -> int:
    """Map an effort to its number: names low 50, high 75 (default), max 100; integers 1-100 pass through.

    Raises:
        ValueError: an unknown name, or a number outside 1-100.
    """
    if effort is None:
        return NAMED_EFFORTS[DEFAULT_EFFORT]
    if isinstance(effort, str):
        if effort in NAMED_EFFORTS:
            return NAMED_EFFORTS[effort]
        digits = effort.isascii() and effort.isdigit()
        number = int(effort) if digits else 0
    else:
        # True is an int for Python, not for a user
        number = 0 if isinstance(effort, bool) or not isinstance(effort, int) else effort
    if not 1 <= number <= 100:
        raise ValueError(f"effort must be one of {sorted(NAMED_EFFORTS)} or an integer 1-100, got {effort!r}")
    return number
