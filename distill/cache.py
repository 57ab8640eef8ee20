"""Teachers' last hidden states on disk: one file a context, by content, checksummed, whole or not at all, bounded in size.

The key is a hash of the teacher's weights and of the context's token ids, so the same context is scored once, also across
a kill and a resume, and a state of other weights is never found. An entry holds the rows that predict a target; one that
lacks a row that is asked for counts as absent. What is damaged counts as absent too: it is made again.

The oldest entries go first when there is no room. What one step needs is held; where that alone is more than the bound,
nothing is scored and the error says by how much. One process writes a folder.
Shapes: T ids of a context, N rows, E hidden size of the teacher.
"""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from burnish.envs.errors import UserError

logger = logging.getLogger(__name__)

SUFFIX = ".states"
DIGEST_BYTES = 32
HEAD_BYTES = 1024
"""More than a file holds beside its tensors: digest and names."""


def context_key(teacher: str, ids: Sequence[int]) -> str:
    """Name of an entry.

    Args:
        teacher: hash of everything that decides the teacher's hidden states.
        ids: the context from its first token.
    """
    return hashlib.sha256(f"{teacher}/".encode() + np.asarray(ids, dtype="<i4").tobytes()).hexdigest()


def entry_bytes(num_rows: int, width: int, dtype: torch.dtype = torch.float32) -> int:
    """Upper bound of the size of an entry's file."""
    return num_rows * (width * dtype.itemsize + 8) + HEAD_BYTES


class StateCache:
    """Hidden states by content.

    Args:
        folder: made when missing; entries of an earlier process are found again.
        max_bytes: of all entries together.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.num_damaged = self.num_evicted = 0
        self._held: frozenset[str] = frozenset()
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in folder.glob("*.writing"):
            left_over.unlink()
        found = sorted((p.stat().st_mtime_ns, p.name, p.stat().st_size) for p in folder.glob(f"*{SUFFIX}"))
        self._sizes = OrderedDict((name.removesuffix(SUFFIX), size) for _, name, size in found)
        """Entries, the longest unused first."""
        self.num_bytes = sum(self._sizes.values())
        """Size of all entries."""
        self._make_room(0)

    def hold(self, needed: Iterable[tuple[str, int]]) -> None:
        """From now on these entries stay, and no others need to.

        Args:
            needed: key and size at most (`entry_bytes`) of everything that is read before the next call.

        Raises:
            UserError: they are larger than the bound together.
        """
        sizes = dict(needed)
        total = sum(sizes.values())
        if total > self.max_bytes:
            raise UserError(
                f"cache.max_gib={self.max_bytes / 2**30:.3g} cannot hold the teachers' hidden states of one optimizer step "
                f"({total / 2**30:.3g} GiB): raise it to at least {total / 2**30 * 1.05:.3g}, or lower algo.groups_per_step"
            )
        self._held = frozenset(sizes)

    def get(self, key: str, rows: torch.Tensor) -> torch.Tensor | None:
        """States [N, E] of these rows of the entry, or None where they are not to be had.

        Args:
            rows: int64 [N], ascending.
        """
        entry = self._read(key) if key in self._sizes else None
        if entry is not None:
            self._sizes.move_to_end(key)
            there, states = entry
            place = torch.searchsorted(there, rows).clamp(max=max(len(there) - 1, 0))
            if len(there) and torch.equal(there[place], rows):
                return states[place]
        return None

    def put(self, key: str, rows: torch.Tensor, states: torch.Tensor) -> None:
        """Writes an entry, or replaces it.

        Args:
            rows: int64 [N], ascending.
            states: [N, E].
        """
        payload = save({"rows": rows.to(torch.int64).contiguous(), "states": states.detach().contiguous()})
        data = _digest(payload) + payload
        self._forget(key)
        self._make_room(len(data))
        path = self._path(key)
        staged = path.with_suffix(".writing")
        # not forced to the disk: after a power cut the checksum tells, and only time is lost
        staged.write_bytes(data)
        staged.replace(path)
        self._sizes[key] = len(data)
        self.num_bytes += len(data)

    def _read(self, key: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        try:
            data = self._path(key).read_bytes()
            if _digest(data[DIGEST_BYTES:]) != data[:DIGEST_BYTES]:
                raise ValueError("its checksum differs")
            entry = load(data[DIGEST_BYTES:])
            return entry["rows"], entry["states"]
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            logger.warning("Hidden states %s cannot be used (%s); they are made again", self._path(key), error)
            self.num_damaged += 1
            self._forget(key)
            return None

    def _make_room(self, size: int) -> None:
        for key in [key for key in self._sizes if key not in self._held]:
            if self.num_bytes + size <= self.max_bytes:
                return
            self._forget(key)
            self.num_evicted += 1

    def _forget(self, key: str) -> None:
        if key in self._sizes:
            self.num_bytes -= self._sizes.pop(key)
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()
