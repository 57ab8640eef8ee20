"""What is known of one teacher before anything of it is loaded, and the error that names it. Torch-free."""

from dataclasses import dataclass

from burnish.envs.errors import UserError


class TeacherError(UserError):
    """A teacher that nothing can be learnt from; says which, and why."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """One specialist. Plain values: it crosses processes."""

    name: str
    policy: str
    """Policy folder."""
    hash: str
    """Of the folder's config, weights and tokenizer when the run was started."""
    weight: float
    """Of its tokens' loss."""
    width: int
    """Hidden size."""
    vocab_size: int
