"""Training states on disk: complete or absent, checked on the way in, and exact to the random generators.

A state is a folder `step-N` with its files, `state.json` (facts) and `checksums.json` (sha256 of every file). It is
written as `.writing-step-N`, fsynced and renamed, so that a kill at any instant leaves the older states as they were.
"""

import json
import logging
import random
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from burnish.policy.checkpoint.lineage import file_hash
from burnish.policy.checkpoint.whole_files import sync

logger = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A training state that cannot be loaded; names the file."""


class CheckpointStore:
    """The training states of one run, newest last.

    Args:
        directory: made when missing.
        keep: complete states that stay after a commit.
    """

    def __init__(self, directory: Path, *, keep: int) -> None:
        self.directory, self.keep = Path(directory), keep
        self.is_first_rank = not dist.is_initialized() or dist.get_rank() == 0

    def begin(self, step: int) -> Path:
        """An empty folder to write step `step` into; all ranks call it."""
        folder = self._writing(step)
        if self.is_first_rank:
            self._clear_left_overs()
            folder.mkdir(parents=True)
        _barrier()
        return folder

    def commit(self, step: int, facts: dict[str, Any]) -> Path:
        """Make what was written the newest state; all ranks call it, after their last write."""
        _barrier()
        target = self.directory / f"step-{step}"
        if self.is_first_rank:
            folder = self._writing(step)
            (folder / "state.json").write_text(json.dumps(facts, indent=1))
            files = sorted(p for p in folder.rglob("*") if p.is_file())
            sums = {p.relative_to(folder).as_posix(): file_hash(p) for p in files}
            (folder / "checksums.json").write_text(json.dumps(sums, indent=1))
            for path in [*files, folder / "checksums.json", *(p for p in folder.rglob("*") if p.is_dir()), folder]:
                sync(path)
            if target.exists():  # the same step again: a resumed run that stepped without a newer state
                target.rename(self.directory / f".replaced-step-{step}")
            folder.rename(target)
            sync(self.directory)
            self._remove_old()
        _barrier()
        return target

    def states(self) -> list[Path]:
        """Complete states, oldest first."""
        found = [(int(m[1]), p) for p in self.directory.glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name))]
        return [path for _, path in sorted(found)]

    def latest(self) -> Path | None:
        """The newest complete state."""
        states = self.states()
        # killed between the two renames of `commit`: the replaced folder is the newest complete state
        stranded = [p for p in self.directory.glob(".replaced-step-*") if not self._original(p).exists()]
        return stranded[-1] if stranded else states[-1] if states else None

    def remove_from(self, since: int) -> None:
        """Remove the states of step `since` and later: they are not to be gone on from."""
        for state in self.states():
            if int(state.name.removeprefix("step-")) >= since:
                self._remove(state)
        self._clear_left_overs()

    def verify(self, folder: Path, **expected: Any) -> dict[str, Any]:
        """Check every file of a state; returns its facts.

        Args:
            expected: facts that must hold, such as world=2.

        Raises:
            CheckpointError: names the damaged or missing file, or the fact that differs.
        """
        others = [p.name for p in self.states() if p != folder]
        advice = f"remove {folder} to resume from {others[-1]}" if others else "no older state is left"
        try:
            sums = json.loads((folder / "checksums.json").read_text())
            for name, digest in sums.items():
                if file_hash(folder / name) != digest:
                    raise CheckpointError(f"training state {folder}: {name} is damaged (checksum differs); {advice}")
            facts = json.loads((folder / "state.json").read_text())
        except FileNotFoundError as missing:
            raise CheckpointError(f"training state {folder}: {missing.filename} is missing; {advice}") from None
        except json.JSONDecodeError as broken:
            raise CheckpointError(f"training state {folder}: checksums.json is damaged ({broken}); {advice}") from None
        for name, value in expected.items():
            if facts[name] != value:
                raise CheckpointError(
                    f"training state {folder} was written with {name}={facts[name]}, this run has {name}={value}: "
                    f"resume with {name}={facts[name]}"
                )
        return facts

    def _clear_left_overs(self) -> None:
        """Remove what an earlier kill left, except a state whose replacement never arrived."""
        for left_over in [*self.directory.glob(".writing-step-*"), *self.directory.glob(".removed-step-*")]:
            shutil.rmtree(left_over)
        for replaced in self.directory.glob(".replaced-step-*"):
            original = self._original(replaced)
            if original.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(original)

    def _original(self, replaced: Path) -> Path:
        return self.directory / replaced.name.removeprefix(".replaced-")

    def _writing(self, step: int) -> Path:
        return self.directory / f".writing-step-{step}"

    def _remove_old(self) -> None:
        for old in self.states()[: -self.keep]:
            self._remove(old)
        self._clear_left_overs()

    def _remove(self, state: Path) -> None:
        # renamed first: a half-removed folder must not look like a state
        doomed = self.directory / f".removed-{state.name}"
        state.rename(doomed)
        shutil.rmtree(doomed)


def rng_state() -> dict[str, Any]:
    """States of this process's random generators."""
    import numpy as np

    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators back where `rng_state` found them."""
    import numpy as np

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
