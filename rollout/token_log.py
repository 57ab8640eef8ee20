"""Writing an attempt's token log: tokens as they are sampled, turns sealed into blocks (format: blocks.py).

What survives what. Each record is one unbuffered append, so kill -9 of the writer loses at most the record in flight.
`close` fsyncs file and directory, and the ledger is told an outcome only after `close`: after a power cut the ledger
never names bytes that are not there. `durable_turns` fsyncs at every seal too, for turns that cost minutes.
"""

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from burnish.policy.inference.prefill import PrefillEntry
from burnish.rollout.blocks import COUNTS, FORMAT, HEAD, TAIL, Kind, TurnTokens, log_path
from burnish.rollout.types import BlockRef

LP_SLACK = 1e-4
"""A log-probability may exceed 0 by rounding, not by more."""


class TokenLog:
    """Writer of one attempt's log. One writer an attempt; an attempt id is never reused, so the file must be new.

    with TokenLog(directory, attempt_id) as log:
        log.open_turn(context_id="0", turn=0, start=0, input_ids=prompt)
        log.append_prefill(entry)
        log.append_sampled(ids, lp_raw, lp_behaviour, versions, kept)   # as often as tokens arrive
        ref = log.seal_turn()
    """

    def __init__(self, directory: Path, attempt_id: str, *, durable_turns: bool = False) -> None:
        """Raises:
        FileExistsError: this attempt already has a log.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.path = log_path(directory, attempt_id)
        self.attempt_id = attempt_id
        self.refs: list[BlockRef] = []
        """Sealed so far."""
        self._durable_turns = durable_turns
        self._fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
        self._crc = 0
        self._size = 0
        self._turn: TurnTokens | None = None
        self._turn_offset = 0
        self._turn_sha = hashlib.sha256()
        self._write_json(Kind.log, {"format": FORMAT, "attempt_id": attempt_id})

    def open_turn(self, *, context_id: str, turn: int, start: int, input_ids: Sequence[int]) -> None:
        """Begins a block with the tokens the turn adds before sampling (prompt, tool output, turn markers).

        Args:
            start: position in the context of the first of them; the previous block of this context ends there.
        """
        if self._turn is not None:
            raise ValueError(f"attempt {self.attempt_id}: turn {self._turn.turn} is still open, seal it first")
        earlier = [ref.start + ref.num_tokens for ref in self.refs if ref.context_id == context_id]
        if earlier and earlier[-1] != start:
            raise ValueError(
                f"attempt {self.attempt_id} context {context_id}: a context only grows at its end, "
                f"expected start {earlier[-1]}, got {start}"
            )
        self._turn_offset, self._turn_sha = self._size, hashlib.sha256()
        head = {"context_id": context_id, "turn": turn, "start": start, "index": len(self.refs)}
        self._turn = TurnTokens(attempt_id=self.attempt_id, **head)
        self._write_json(Kind.open, head)
        self.append_input(input_ids)

    def append_input(self, ids: Sequence[int]) -> None:
        """Adds tokens that the policy did not sample."""
        turn = self._open()
        ids_T = np.asarray(ids, np.int32).reshape(-1)
        if len(ids_T):
            turn.add_input(ids_T)
            self._write(Kind.input, ids_T.tobytes())

    def append_sampled(
        self,
        ids: Sequence[int],
        lp_raw: Sequence[float],
        lp_behaviour: Sequence[float],
        versions: Sequence[int],
        kept: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Adds tokens as they were sampled.

        Args:
            kept: per token the ids left after top-k / top-p; None (or an empty set) = the full vocabulary.

        Raises:
            ValueError: lengths differ, a log-probability is missing or above 0, a token lies outside its kept set.
        """
        turn = self._open()
        if lp_raw is None or lp_behaviour is None:
            raise ValueError(f"attempt {self.attempt_id}: sampled tokens without log-probabilities cannot be trained")
        ids_T, versions_T = np.asarray(ids, np.int32).reshape(-1), np.asarray(versions, np.int32).reshape(-1)
        raw_T, behaviour_T = (
            np.asarray(lp_raw, np.float32).reshape(-1),
            np.asarray(lp_behaviour, np.float32).reshape(-1),
        )
        sets = [()] * len(ids_T) if kept is None else kept
        lengths = {len(ids_T), len(versions_T), len(raw_T), len(behaviour_T), len(sets)}
        if len(lengths) != 1:
            raise ValueError(
                f"attempt {self.attempt_id}: per-token lengths differ: ids {len(ids_T)}, lp_raw {len(raw_T)}, "
                f"lp_behaviour {len(behaviour_T)}, versions {len(versions_T)}, kept {len(sets)}"
            )
        for name, lp in (("lp_raw", raw_T), ("lp_behaviour", behaviour_T)):
            bad = np.flatnonzero(~(np.isfinite(lp) & (lp <= LP_SLACK)))
            if len(bad):
                raise ValueError(f"attempt {self.attempt_id}: {name} of sampled token {bad[0]} is {lp[bad[0]]}")
        if len(versions_T) and versions_T.min() < 0:
            raise ValueError(f"attempt {self.attempt_id}: a sampled token has policy version {versions_T.min()}")
        for i, (token, members) in enumerate(zip(ids_T.tolist(), sets, strict=True)):
            if len(members) and token not in members:
                raise ValueError(f"attempt {self.attempt_id}: sampled token {i} (id {token}) is not in its kept set")
        if not len(ids_T):
            return
        counts = np.array([len(members) for members in sets], np.uint32)
        flat = np.array([j for members in sets for j in members], np.int32)
        columns = (ids_T, raw_T, behaviour_T, versions_T, counts, flat)
        payload = COUNTS.pack(len(ids_T), len(flat)) + b"".join(column.tobytes() for column in columns)
        turn.add_sampled(payload)
        self._write(Kind.sampled, payload)

    def append_prefill(self, entry: PrefillEntry) -> None:
        """Adds what one prefill of this turn did."""
        self._open().prefills.append(entry)
        self._write_json(Kind.prefill, entry.to_dict())

    def append_routes(self, first: int, routes: np.ndarray) -> None:
        """Adds routed experts of the rows that fed tokens first, first + 1, ... of this block.

        Args:
            routes: uint16 [n, L, K]; 0xFFFF where absent.
        """
        turn = self._open()
        if routes.dtype != np.uint16 or routes.ndim != 3:
            raise ValueError(f"routes: expected uint16 [tokens, layers, experts], got {routes.dtype} {routes.shape}")
        if first < 0 or first + len(routes) > turn.num_tokens:
            raise ValueError(f"routes: rows {first}..{first + len(routes)} of a block of {turn.num_tokens} tokens")
        if turn.routes and turn.routes[0][1].shape[1:] != routes.shape[1:]:
            raise ValueError(f"routes: shape {routes.shape[1:]} a token, expected {turn.routes[0][1].shape[1:]}")
        payload = struct.pack("<IIII", first, *routes.shape) + np.ascontiguousarray(routes).tobytes()
        turn.add_routes(payload)
        self._write(Kind.routes, payload)

    def seal_turn(self) -> BlockRef:
        """Makes the open turn an immutable block."""
        turn = self._open()
        digest, size = self._turn_sha.hexdigest(), self._size - self._turn_offset
        ref = turn.ref(self._turn_offset, size, digest)
        self._turn = None
        self._write_json(Kind.seal, {"digest": digest, "tokens": ref.num_tokens, "sampled": ref.num_sampled})
        if self._durable_turns:
            os.fsync(self._fd)
        self.refs.append(ref)
        return ref

    def close(self) -> None:
        """Fsyncs and closes; idempotent. Call it before the ledger hears of the attempt's outcome."""
        if self._fd < 0:
            return
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def __enter__(self) -> "TokenLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _open(self) -> TurnTokens:
        if self._turn is None:
            raise ValueError(f"attempt {self.attempt_id}: no turn is open")
        return self._turn

    def _write_json(self, kind: Kind, values: dict[str, Any]) -> None:
        self._write(kind, json.dumps(values, separators=(",", ":")).encode())

    def _write(self, kind: Kind, payload: bytes) -> None:
        head = HEAD.pack(len(payload), kind) + payload
        self._crc = zlib.crc32(head, self._crc)
        record = head + TAIL.pack(self._crc)
        view = memoryview(record)
        while view:
            view = view[os.write(self._fd, view) :]
        self._size += len(record)
        self._turn_sha.update(record)
