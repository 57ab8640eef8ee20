"""burnish replay RUN SLOT: one trajectory of an RL run computed again, and its verdict reached again. Reads the run only.

Each sampled token has its log-probability as it was recorded, as the engine gives it now and as the trainer gives it now,
under the weights that sampled it. Exit code 0: all that can be computed again is equal (to the bit where the run was
deterministic, within `max_difference` else), and something could be. 1: it is not. 2: there is no such run or slot.
"""

import difflib
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from burnish.envs.config import SandboxKind
from burnish.envs.errors import UserError
from burnish.policy.checkpoint.json_file import read_object
from burnish.policy.encoding.tokenizer import Tokenizer, check_fits
from burnish.rollout.blocks import BlockError
from burnish.rollout.config import ReplayRun, RlRun, Schedule
from burnish.rollout.ledger_schema import LedgerError
from burnish.rollout.ledger_view import LedgerView
from burnish.rollout.replay.tokens import Comparison, Token, TokenReplay
from burnish.rollout.replay.verdict import Regraded, regrade
from burnish.rollout.replay.weights import NoWeights, last_shared_version, weights_of
from burnish.rollout.run_folder import CONFIG, LEDGER, MANIFEST, read_run
from burnish.rollout.types import Trajectory

logger = logging.getLogger(__name__)


def main(config: ReplayRun) -> int:
    """Computes, prints and compares; the exit code is the comparison's."""
    import torch

    run_dir = Path(config.run)
    run, manifest = settings_of(run_dir)
    ledger = open_ledger(run_dir)
    try:
        trajectory = trajectory_of(ledger, config.slot)
        # in lockstep every version is made again of the same slots
        is_remade = run.schedule is Schedule.lockstep
        shared = None if is_remade else last_shared_version(ledger, trajectory.attempt_id)
    finally:
        ledger.close()
    tokenizer = check_fits(Path(run.policy), run.encoding.system_token_id)
    # as the run does at its start: engine and trainer know of the same ids that are never sampled
    run.engine = run.engine.reserving(tokenizer.never_written())
    run.sandbox = sandbox_of(config, run)
    torch.set_num_threads(run.cluster.threads_per_actor)
    replay, problem = replay_tokens(run, run_dir, manifest, trajectory, shared)
    regraded = regrade(run, trajectory, manifest["parents"].get("tasks", "")) if config.verdict else None
    verdict = compare(run, config, replay, problem, regraded)
    if config.json:
        sys.stdout.write(json.dumps(as_object(run, manifest, trajectory, replay, regraded, verdict), indent=1) + "\n")
    else:
        show(config, run, trajectory, replay, regraded, verdict, tokenizer)
    return 0 if verdict["equal"] else 1


def sandbox_of(config: ReplayRun, run: RlRun) -> SandboxKind:
    """Where recorded commands run again. Never local unless somebody said so: what a policy did in a container, such as
    ending every process it saw, would be done to this machine.
    """
    chosen = run.sandbox if config.sandbox is SandboxKind.auto else config.sandbox
    return SandboxKind.docker if chosen is SandboxKind.auto else chosen


def settings_of(run_dir: Path) -> tuple[RlRun, dict[str, Any]]:
    """(settings, manifest) of an RL run.

    Raises:
        UserError: the folder is none; names the one below it that is.
    """
    if not (run_dir / LEDGER).is_file() or not (run_dir / CONFIG).is_file():
        below = sorted(str(path.parent) for path in run_dir.glob(f"*/{LEDGER}")) if run_dir.is_dir() else []
        hint = f"; give {' or '.join(below)}" if below else ""
        missing = next(name for name in (LEDGER, CONFIG) if not (run_dir / name).is_file())
        raise UserError(f"{run_dir} is not the folder of an RL run: {run_dir / missing} is missing{hint}")
    manifest = read_object(run_dir / MANIFEST, "stage", "parents", advice="take the run's folder from a copy")
    if manifest["stage"] != "rl":
        raise UserError(f"{run_dir} is a run of `burnish {manifest['stage']}`: only those of rl are computed again")
    return read_run(RlRun(resume=str(run_dir)), "rl"), manifest


def open_ledger(run_dir: Path) -> LedgerView:
    """Raises:
    UserError: it cannot be read.
    """
    try:
        return LedgerView.open(run_dir / LEDGER)
    except LedgerError as error:
        raise UserError(str(error)) from error


def trajectory_of(ledger: LedgerView, name: str) -> Trajectory:
    """The trajectory of an attempt, or of the attempt that a slot counts with, or else its last one.

    Raises:
        UserError: no such slot or attempt, or nothing of it was recorded; says what there is.
    """
    attempts = ledger.rows("SELECT attempt_id, trajectory FROM attempts WHERE attempt_id = ?", name)
    if not attempts:
        slots = ledger.rows("SELECT attempt_id, disposition FROM slots WHERE slot_id = ?", name)
        if not slots:
            known = [row["slot_id"] for row in ledger.rows("SELECT slot_id FROM slots ORDER BY slot_id")]
            near = difflib.get_close_matches(name, known, 1)
            hint = (
                f"did you mean {near[0]}?" if near else f"they are {known[0]} to {known[-1]}" if known else "none yet"
            )
            raise UserError(f"no slot {name!r} among the {len(known)} of this run; {hint}")
        attempts = ledger.rows(
            "SELECT attempt_id, trajectory FROM attempts WHERE slot_id = ? AND (attempt_id = ? OR ? IS NULL)"
            " ORDER BY trajectory IS NULL, number DESC",
            name,
            slots[0]["attempt_id"],
            slots[0]["attempt_id"],
        )
        if not attempts:
            raise UserError(f"slot {name} is {slots[0]['disposition']}: it was never played")
    if attempts[0]["trajectory"] is None:
        raise UserError(f"attempt {attempts[0]['attempt_id']} left no trajectory: it is in flight, or was abandoned")
    return ledger.trajectory(attempts[0]["attempt_id"])


def replay_tokens(
    run: RlRun, run_dir: Path, manifest: Mapping[str, Any], trajectory: Trajectory, shared: int | None
) -> tuple[TokenReplay | None, str]:
    """(tokens computed under every version that can be had, what is wrong with the blocks)."""
    from burnish.policy.checkpoint.released import load_policy

    try:
        replay = TokenReplay(run, trajectory, run_dir / "blocks")
    except BlockError as error:
        return None, str(error)
    for version in replay.versions:
        if shared is not None and version > shared:
            reason = (
                f"the run went back to version {shared} after this attempt: version {version} then was other weights"
            )
            replay.give_up(version, reason)
            continue
        try:
            weights = weights_of(version, run, run_dir, manifest)
        except NoWeights as error:
            replay.give_up(version, str(error))
            continue
        model = load_policy(Path(run.policy)).requires_grad_(False)
        model.load_state_dict(weights.state)
        replay.compute(model, version)
        logger.info("Version %d: weights from %s", version, weights.where)
    return replay, ""


def compare(
    run: RlRun, config: ReplayRun, replay: TokenReplay | None, problem: str, regraded: Regraded | None
) -> dict[str, Any]:
    """What is equal, and each thing that is not, in a sentence."""
    bound = 0.0 if run.engine.deterministic else config.max_difference
    faults = [f"blocks: {problem}"] if problem else []
    compared = 0
    if replay is not None:
        for name, found in (("engine", replay.engine_comparison()), ("trainer", replay.trainer_comparison())):
            compared += found.count
            # a NaN is not within any bound
            if not (found.max_abs <= bound and found.mean_abs <= bound):
                faults.append(f"{name}: log-probabilities differ by up to {found.max_abs:.3g}, the bound is {bound:g}")
        others = [token for token in replay.tokens if token.drawn is not None and token.drawn != token.token_id]
        if others and run.engine.deterministic:
            faults.append(
                f"engine: {len(others)} tokens are drawn otherwise, the first at position {others[0].position}"
            )
    if regraded is not None:
        compared += regraded.again is not None
        if regraded.problem:
            faults.append(f"verdict: {regraded.problem}")
        for name, (before, now) in regraded.differences.items():
            faults.append(f"verdict: {name} was {before}, is {now}")
    if not compared and not faults:
        faults.append("nothing could be computed again, so nothing is shown to be equal")
    return {"equal": not faults, "bound": bound, "deterministic": run.engine.deterministic, "faults": faults}


def as_object(
    run: RlRun,
    manifest: Mapping[str, Any],
    trajectory: Trajectory,
    replay: TokenReplay | None,
    regraded: Regraded | None,
    verdict: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything, for machines."""
    tokens = [] if replay is None else replay.tokens
    comparisons = (
        {} if replay is None else {"engine": replay.engine_comparison(), "trainer": replay.trainer_comparison()}
    )
    return {
        "run": run.name,
        "code": manifest.get("code"),
        "slot": trajectory.slot.slot_id,
        "attempt": trajectory.attempt_id,
        "task": trajectory.slot.task_id,
        "outcome": str(trajectory.outcome),
        **verdict,
        "comparisons": {name: asdict(found) for name, found in comparisons.items()},
        "not_recomputed": reasons(tokens),
        "tokens": [{key: value for key, value in asdict(token).items() if key != "kept"} for token in tokens],
        "verdict": None
        if regraded is None
        else asdict(regraded) | {"equal": regraded.is_equal, "differences": regraded.differences},
    }


def reasons(tokens: Sequence[Token]) -> dict[str, int]:
    """Reason -> tokens that cannot be computed again for it."""
    return dict(Counter(token.why_not for token in tokens if token.why_not))


def show(
    config: ReplayRun,
    run: RlRun,
    trajectory: Trajectory,
    replay: TokenReplay | None,
    regraded: Regraded | None,
    verdict: Mapping[str, Any],
    tokenizer: Tokenizer,
) -> None:
    """Prints a table of tokens, the comparisons and the verdict."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    title = (
        f"{trajectory.slot.task_id}: attempt {trajectory.attempt_id}, {trajectory.outcome} ({trajectory.stop_reason})"
    )
    console.print(title, markup=False)
    if replay is not None:
        console.print(token_table(replay.tokens, config.rows, tokenizer))
        for name, found in (("engine", replay.engine_comparison()), ("trainer", replay.trainer_comparison())):
            console.print(f"{name} now against recorded: {sentence_of(found)}", markup=False)
        for reason, count in reasons(replay.tokens).items():
            console.print(f"{count} tokens not computed again: {reason}", markup=False)
    for line in lines_of(regraded, trajectory, is_asked=config.verdict):
        console.print(line, markup=False)
    for fault in verdict["faults"]:
        console.print(f"NOT EQUAL  {fault}", markup=False)
    if verdict["equal"]:
        how = (
            "to the bit" if verdict["deterministic"] else f"within {verdict['bound']:g} (the run was not deterministic)"
        )
        console.print(f"equal {how}", markup=False)


def sentence_of(found: Comparison) -> str:
    return f"{found.count} tokens, largest difference {found.max_abs:.3g}, mean {found.mean_abs:.3g}, KL {found.mean_kl:.3g}"


def token_table(tokens: Sequence[Token], rows: int, tokenizer: Tokenizer) -> Table:
    """The tokens in order; of more than `rows` those that differ most."""
    shown = sorted(sorted(tokens, key=lambda t: -unlikeness(t))[:rows], key=lambda t: t.place)
    hidden = len(tokens) - len(shown)
    table = Table(caption=f"{hidden} tokens that differ less are not shown: rows={len(tokens)}" if hidden else None)
    for heading in ("context", "position", "turn", "version", "token", "recorded", "engine", "trainer", "drawn"):
        table.add_column(heading, justify="left" if heading == "token" else "right", no_wrap=True)
    for token in shown:
        drawn = "" if token.drawn is None else "same" if token.drawn == token.token_id else str(token.drawn)
        cells = [token.context, token.position, token.turn, token.version, repr(tokenizer.token(token.token_id))]
        cells += [f"{token.recorded:.6f}", difference(token.engine, token), difference(token.trainer, token), drawn]
        # the policy's words are no markup
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table


def unlikeness(token: Token) -> float:
    return max(abs(now - token.recorded) for now in (token.engine, token.trainer, token.recorded) if now is not None)


def difference(now: float | None, token: Token) -> str:
    """How a recomputed log-probability stands to the recorded one."""
    if now is None:
        return "-"
    return "same" if now == token.recorded else f"{now - token.recorded:+.2e}"


def lines_of(regraded: Regraded | None, trajectory: Trajectory, *, is_asked: bool) -> list[str]:
    """About the verdict."""
    if not is_asked:
        return ["verdict: not asked for (verdict=false)"]
    if regraded is None:
        return [f"verdict: none was reached ({trajectory.error or trajectory.outcome}), so there is none to compare"]
    before = ", ".join(f"{name} {value}" for name, value in regraded.recorded.items())
    lines = [f"verdict recorded: {before}"]
    if regraded.again is not None:
        now = ", ".join(f"{name} {value}" for name, value in regraded.again.items())
        lines.append(f"verdict now: {now}; graded was {regraded.how}")
    if regraded.turns_played:
        odd = ", ".join(map(str, regraded.turns_that_differ))
        lines.append(
            f"{regraded.turns_played} commands were run again; "
            + (f"turns {odd} now print something else" if odd else "all print what they printed")
        )
    if regraded.same_artifacts is not None:
        lines.append("what was graded is " + ("the same" if regraded.same_artifacts else "not the same, byte for byte"))
    return lines
