"""Is a teacher fit to be learnt from? Asked of its files before anything runs, and of what it says before the first step.

A teacher that lost its weights is uniform: the student would be driven to noise with a loss that looks plausible. One with
another tokenizer means other words by the same ids. Each check that fails says which teacher, what was found and what to do.
Torch-free, except for `check_says`, which gets tensors.

Shapes: N tokens of the student's trajectories.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from burnish.distill.config import HealthConfig, TeacherConfig
from burnish.distill.specialist import Teacher, TeacherError
from burnish.policy.checkpoint.json_file import read_object
from burnish.policy.checkpoint.lineage import policy_hash
from burnish.policy.encoding.tokenizer import Tokenizer, check_fits
from burnish.policy.released_config import load_config

if TYPE_CHECKING:
    import torch

CONDITIONS, SUMMARY = "conditions.json", "summary.json"


def check_files(
    name: str, config: TeacherConfig, student: Tokenizer, *, system_token_id: int, context: int, health: HealthConfig
) -> Teacher:
    """What a teacher's folder says, held against the student.

    Args:
        student: the student's tokenizer.
        system_token_id: see EncodingConfig.
        context: tokens of the longest trajectory.

    Raises:
        TeacherError: naming the teacher and what is wrong.
    """
    folder = Path(config.policy)
    try:
        model = load_config(folder)
        tokenizer = check_fits(folder, system_token_id)
    except (ValueError, OSError) as error:
        raise TeacherError(f"teacher {name}: {error}") from error
    if tokenizer.fingerprint != student.fingerprint:
        raise TeacherError(
            f"teacher {name}: {first_difference(tokenizer, student)}; it must have the student's tokenizer"
        )
    if model.max_position_embeddings < context:
        raise TeacherError(
            f"teacher {name}: its context is {model.max_position_embeddings} tokens, episode.max_context_tokens is {context}"
        )
    teacher = Teacher(
        name=name,
        policy=config.policy,
        hash=policy_hash(folder),
        weight=config.weight,
        width=model.hidden_size,
        vocab_size=model.vocab_size,
    )
    if config.evaluation:
        check_evaluation(teacher, Path(config.evaluation), health.min_pass)
    elif health.min_pass > 0:
        raise TeacherError(f"teacher {name}: health.min_pass={health.min_pass} needs teachers.{name}.evaluation=DIR")
    return teacher


def first_difference(teacher: Tokenizer, student: Tokenizer) -> str:
    """Where two tokenizers part, in words."""
    for token_id in range(min(teacher.vocab_size, student.vocab_size)):
        if teacher.token_bytes(token_id) != student.token_bytes(token_id):
            return (
                f"id {token_id} is {teacher.token(token_id)!r} for it and {student.token(token_id)!r} for the student"
            )
        if (token_id in teacher.added_ids) != (token_id in student.added_ids):
            return f"id {token_id} ({teacher.token(token_id)!r}) is a special token for one of the two only"
    return f"its tokenizer has {teacher.vocab_size} ids, the student's {student.vocab_size}"


def check_evaluation(teacher: Teacher, folder: Path, min_pass: float) -> None:
    """Its pass rate is of this very policy and high enough.

    Raises:
        TeacherError: no evaluation, one of another policy, or too low a rate.
    """
    where = f"teacher {teacher.name}: evaluation {folder}"
    try:
        conditions, summary = read_object(folder / CONDITIONS), read_object(folder / SUMMARY, "all")
        rate = float(summary["all"]["pass"])
    except (ValueError, LookupError, TypeError, OSError) as error:
        raise TeacherError(f"{where}: cannot be read ({error}); make it with `burnish eval`") from error
    if conditions.get("policy") != teacher.hash:
        raise TeacherError(f"{where} is of another policy than {teacher.policy}; evaluate this one")
    if not rate >= min_pass:
        raise TeacherError(f"{where}: it passes {rate:.3f} of the tasks, health.min_pass is {min_pass:g}")


def check_says(
    name: str, logprobs: "torch.Tensor", entropies: "torch.Tensor", num_ids: int, health: HealthConfig
) -> None:
    """What the teacher thinks of the student's first trajectories is sane.

    Args:
        logprobs: [N] of the sampled tokens, under the teacher.
        entropies: [N] nats, of the teacher.
        num_ids: ids that can be sampled.

    Raises:
        TeacherError: naming the teacher, the number and its bound.
    """
    where = f"teacher {name}: on the student's first {len(logprobs)} tokens"
    advice = "it may have lost its weights or be of another domain; look at it with `burnish eval`"
    uniform = math.log(num_ids)
    if not bool(logprobs.isfinite().all() and entropies.isfinite().all()):
        raise TeacherError(f"{where} its probabilities are not finite; take another checkpoint")
    spread = float(logprobs.double().std(correction=0))
    if len(logprobs) > 1 and spread < health.min_logprob_std:
        raise TeacherError(
            f"{where} its log-probabilities hardly differ (standard deviation {spread:.2g}, health.min_logprob_std "
            f"is {health.min_logprob_std:g}, mean {float(logprobs.mean()):.3f}, uniform {-uniform:.3f}); {advice}"
        )
    share = float(entropies.double().mean()) / uniform
    if share > health.max_entropy_share:
        raise TeacherError(
            f"{where} its entropy is {share:.3f} of the uniform distribution's, health.max_entropy_share is "
            f"{health.max_entropy_share:g}; {advice}"
        )
    share = math.exp(min(-float(logprobs.double().mean()) - uniform, 700.0))
    if share > health.max_perplexity_share:
        raise TeacherError(
            f"{where} its perplexity is {share:.3g} of the vocabulary's size, health.max_perplexity_share is "
            f"{health.max_perplexity_share:g}; {advice}"
        )
