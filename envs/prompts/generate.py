"""Entry point of `burnish prompts`: problems of procedural families, gated, as a prompt file with its own scorer."""

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

from burnish.envs.errors import UserError
from burnish.envs.prompts.config import PromptsRun
from burnish.envs.prompts.procedural import check_families, family_names, problems_of
from burnish.envs.synthesis.publish import write_atomically

logger = logging.getLogger(__name__)


def main(run: PromptsRun) -> int:
    """Writes `run.out`; the same settings write the same bytes."""
    out = Path(run.out)
    if out.suffix != ".jsonl":
        raise UserError(f"out={out}: a prompt file written here ends in .jsonl")
    if out.exists():
        raise UserError(f"{out} is there already: remove it or give another out=FILE")
    records = generate(run)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    counts = Counter(record["data_source"] for record in records)
    logger.info("%d prompts of %d families: %s", len(records), len(counts), out)
    logger.info("Use it with data.path=%s verifier=reasoning_gym", out)
    return 0


def generate(run: PromptsRun) -> list[dict[str, Any]]:
    """Records of a prompt file, one of every family in turn, so that a prefix holds all of them.

    Raises:
        UserError: a family that is not there, or that was asked for and gives no usable problem.
    """
    check_families([*run.families, *run.options])
    names = run.families or usable_families(run)
    share, rest = divmod(run.num_prompts, len(names))
    found: list[list[dict[str, Any]]] = []
    for index, name in enumerate(names):
        wanted = share + (index < rest)
        records, rejected = problems_of(name, wanted, run.seed, run.options.get(name) or {})
        if len(records) < wanted:
            sentence = f"family {name}: {len(records)} of {wanted} problems pass the gate ({told(rejected)})"
            if run.families:
                raise UserError(f"{sentence}; leave it out, or lower num_prompts")
            logger.warning("%s", sentence)
        found.append(records)
    rounds = max(map(len, found))
    return [records[number] for number in range(rounds) for records in found if number < len(records)]


def usable_families(run: PromptsRun) -> list[str]:
    """Every family with a problem that passes the gate; what is left out is told."""
    usable = []
    for name in family_names():
        try:
            records, rejected = problems_of(name, 1, run.seed, run.options.get(name) or {})
        except UserError as error:
            logger.warning("Left out: %s", error)
            continue
        if records:
            usable.append(name)
        else:
            logger.warning("Left out: family %s (%s)", name, told(rejected))
    return usable


def told(rejected: Counter[str]) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in rejected.most_common())
