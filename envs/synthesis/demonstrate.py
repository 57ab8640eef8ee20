"""Oracle trajectories beyond the task set, for SFT alone: real shells and real outputs, many candidates in one sandbox.

A small policy learns to copy names only from thousands of different ones, and a container for each would cost an
hour. A demonstration is no task: it has no folder and no hidden tests. Its final state is compared, file by file, with
the one the family declares, in the same shell; stray files count as wrong.
"""

import logging
import shlex
from collections.abc import Sequence
from hashlib import sha256

from burnish.envs.sandbox.base import Sandbox, SandboxError, SandboxFactory
from burnish.envs.synthesis.gates import INFRA_ATTEMPTS, Rejected, play
from burnish.envs.synthesis.propose import Candidate
from burnish.envs.synthesis.spec import TaskSpec
from burnish.envs.synthesis.transcript import RecordedTurn
from burnish.envs.synthesis.write import WORKDIR
from burnish.envs.task import Task

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S = 30.0
PLACE = f"{WORKDIR}/demonstration"


def demonstrate_all(
    candidates: Sequence[Candidate], task: Task, sandboxes: SandboxFactory, run_id: str, attempt_id: str
) -> list[list[RecordedTurn] | None]:
    """One sandbox for all of them.

    Args:
        candidates: what to play.
        task: whose environment the sandbox gets.
        sandboxes, run_id, attempt_id: as for `SandboxFactory.create`.

    Returns:
        For each candidate what was recorded, None where the oracle did not lead to the declared state.

    Raises:
        SandboxError: the infrastructure failed INFRA_ATTEMPTS times in a row.
    """
    for attempt in range(INFRA_ATTEMPTS):
        try:
            sandbox = sandboxes.create(task, role="agent", run_id=run_id, attempt_id=f"{attempt_id}-{attempt}")
            try:
                return [_attempt(candidate, sandbox) for candidate in candidates]
            finally:
                sandbox.close()
        except SandboxError as error:
            if attempt == INFRA_ATTEMPTS - 1:
                raise
            logger.warning("%s: the sandbox failed, trying again: %s", attempt_id, error)
    raise AssertionError("unreachable")


def _attempt(candidate: Candidate, sandbox: Sandbox) -> list[RecordedTurn] | None:
    try:
        return demonstrate(candidate.spec, sandbox)
    except Rejected as rejection:
        logger.warning("%s: %s", candidate.id, rejection)
        return None


def demonstrate(spec: TaskSpec, sandbox: Sandbox) -> list[RecordedTurn]:
    """Plays the oracle in a directory of its own, which the next demonstration replaces.

    Raises:
        Rejected: a command failed, printed something unexpected, or led to another state.
        SandboxError: the infrastructure failed.
    """
    _step(sandbox, " && ".join([f"rm -rf {PLACE}", f"mkdir {PLACE}", f"cd {PLACE}", *_creation(spec)]))
    turns = play(spec.turns, sandbox)
    listing = _step(sandbox, "find . -type f -exec sha256sum {} +")
    wanted = [f"{sha256(content).hexdigest()}  ./{path}" for path, content in spec.expected.items()]
    if sorted(listing.splitlines()) != sorted(wanted):
        raise Rejected(f"demonstration: {turns[-1].command!r} leads to the files {listing!r}")
    return turns


def _creation(spec: TaskSpec) -> list[str]:
    parents = sorted({path.rpartition("/")[0] for path in spec.files} - {""})
    make = [f"mkdir -p {' '.join(map(shlex.quote, parents))}"] if parents else []
    write = [f"printf %s {shlex.quote(content.decode())} > {shlex.quote(path)}" for path, content in spec.files.items()]
    return make + write


def _step(sandbox: Sandbox, command: str) -> str:
    result = sandbox.run(command, STEP_TIMEOUT_S)
    if result.exit_code != 0 or result.truncated:
        raise Rejected(f"demonstration: {command!r} ended with {result.exit_code}: {result.output!r}")
    return result.output
