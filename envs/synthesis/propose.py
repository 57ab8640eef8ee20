"""Which candidates to make: a quota for every (split, family, difficulty), filled in a fixed order without duplicates.

The n-th candidate of a cell is a function of the seed, the cell and n, so a run that is taken up again proposes the
same candidates, and a rejected one is replaced by the next of its cell.
"""

import random
from collections import Counter
from dataclasses import dataclass

from burnish.envs.config import SynthRun
from burnish.envs.errors import UserError
from burnish.envs.synthesis.generate import DIFFICULTIES, families_of, generate
from burnish.envs.synthesis.spec import TaskSpec
from burnish.envs.synthesis.write import task_id

# a cell that yields only duplicates is asked for more than its family can make
MAX_DUPLICATES_IN_A_ROW = 1000


@dataclass(frozen=True, kw_only=True)
class Cell:
    split: str
    family: str
    difficulty: int


@dataclass(frozen=True, kw_only=True)
class Candidate:
    id: str
    cell: Cell
    spec: TaskSpec


def quotas(run: SynthRun) -> dict[Cell, int]:
    """How many tasks of each cell.

    Raises:
        UserError: a family that the domain does not have, or an unknown difficulty.
    """
    return spread(run, "train", run.num_train) | spread(run, "heldout", run.num_heldout)


def spread(run: SynthRun, split: str, total: int) -> dict[Cell, int]:
    """`total` spread evenly over families and difficulties, in a fixed order; raises as `quotas`."""
    known = families_of(run.domain)
    for family in run.families:
        if family not in known:
            raise UserError(f"families: the domain {run.domain} has no family {family!r}; it has {', '.join(known)}")
    for difficulty in run.difficulty:
        if difficulty not in DIFFICULTIES:
            raise UserError(
                f"difficulty: there is no level {difficulty}; there are {', '.join(map(str, DIFFICULTIES))}"
            )
    cells = [
        Cell(split=split, family=family, difficulty=difficulty)
        for difficulty in sorted(set(run.difficulty))
        for family in (sorted(set(run.families)) or known)
    ]
    share, rest = divmod(total, len(cells))
    return {cell: share + (position < rest) for position, cell in enumerate(cells) if share or position < rest}


class Proposer:
    """Makes candidates; remembers what it made, so that no task is asked twice."""

    def __init__(self, seed: int, num_words: int) -> None:
        self.num_duplicates = 0
        self._seed = seed
        self._num_words = num_words
        self._trials: Counter[Cell] = Counter()
        self._made: Counter[str] = Counter()
        self._seen: set[str] = set()

    def propose(self, cell: Cell) -> Candidate:
        """The next candidate of the cell whose instruction and oracle are new."""
        for _ in range(MAX_DUPLICATES_IN_A_ROW):
            trial = self._trials[cell]
            self._trials[cell] += 1
            rng = random.Random(f"{self._seed}/{cell.split}/{cell.family}/{cell.difficulty}/{trial}")
            spec = generate(cell.family, cell.difficulty, rng, split=cell.split, num_words=self._num_words)
            keys = {f"instruction {spec.instruction}", "oracle " + "\n".join(turn.command for turn in spec.turns)}
            if keys & self._seen:
                self.num_duplicates += 1
                continue
            self._seen |= keys
            index = self._made[cell.split]
            self._made[cell.split] += 1
            return Candidate(id=task_id(spec, index), cell=cell, spec=spec)
        raise UserError(
            f"{cell.split}: family {cell.family} at difficulty {cell.difficulty} has no more new tasks to give"
        )
