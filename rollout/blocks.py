"""The format of token logs and sealed blocks, and reading them: the durable truth about every token of an attempt.

One append-only file per attempt, `<attempt_id>.tokens`; token_log.py writes it. Records are length-prefixed and carry a
CRC-32 chained over everything before them, so a reader stops at the first record that is torn, flipped, missing or out
of order, and says where. A turn is sealed by a record that holds the sha256 of the turn's bytes; from then on those bytes
are an immutable block, and whoever trains on it checks the digest again. Knows no torch and no ledger.

Shapes: T tokens of a block, L layers with experts, K experts a token, M entries of all kept sets.
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from burnish.policy.inference.prefill import PrefillEntry
from burnish.rollout.types import ABSENT_ROUTE, Block, BlockRef, RolloutError

FORMAT = 1
SUFFIX = ".tokens"

HEAD = struct.Struct("<IB")  # payload bytes, kind
TAIL = struct.Struct("<I")  # crc of the log up to here
COUNTS = struct.Struct("<II")


class BlockError(RolloutError):
    """A stored block is missing, torn or does not match its digest. Never train on it."""


class Kind(IntEnum):
    log = 1
    open = 2
    input = 3
    sampled = 4
    prefill = 5
    routes = 6
    seal = 7


@dataclass(kw_only=True)
class TurnTokens:
    """A turn as it grows: the writer checks against it, the reader rebuilds it from records."""

    attempt_id: str
    index: int
    context_id: str
    turn: int
    start: int
    ids: list[np.ndarray] = field(default_factory=list)
    sampled: list[np.ndarray] = field(default_factory=list)
    lp_raw: list[np.ndarray] = field(default_factory=list)
    lp_behaviour: list[np.ndarray] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)
    kept_counts: list[np.ndarray] = field(default_factory=list)
    kept_ids: list[np.ndarray] = field(default_factory=list)
    routes: list[tuple[int, np.ndarray]] = field(default_factory=list)
    prefills: list[PrefillEntry] = field(default_factory=list)
    num_tokens: int = 0
    num_sampled: int = 0

    def add_input(self, ids: np.ndarray) -> None:
        n = len(ids)
        missing = np.full(n, np.nan, np.float32)
        self._add(ids, False, missing, missing, np.full(n, -1, np.int32), np.zeros(n, np.uint32), ids[:0])

    def add_sampled(self, payload: bytes) -> None:
        n, m = COUNTS.unpack_from(payload)
        at = COUNTS.size
        columns = []
        for dtype, count in (
            (np.int32, n),
            (np.float32, n),
            (np.float32, n),
            (np.int32, n),
            (np.uint32, n),
            (np.int32, m),
        ):
            columns.append(np.frombuffer(payload, dtype, count, at))
            at += 4 * count
        if at != len(payload) or int(columns[4].sum()) != m:
            raise BlockError(f"sampled record says {n} tokens and {m} kept ids, its {len(payload)} bytes disagree")
        ids, lp_raw, lp_behaviour, versions, counts, kept = columns
        self._add(ids, True, lp_raw, lp_behaviour, versions, counts, kept)

    def add_routes(self, payload: bytes) -> None:
        first, n, layers, k = struct.unpack_from("<IIII", payload)
        routes = np.frombuffer(payload, np.uint16, n * layers * k, 16).reshape(n, layers, k)
        self.routes.append((first, routes))

    def _add(
        self,
        ids: np.ndarray,
        is_sampled: bool,
        lp_raw: np.ndarray,
        lp_behaviour: np.ndarray,
        versions: np.ndarray,
        counts: np.ndarray,
        kept: np.ndarray,
    ) -> None:
        self.ids.append(ids)
        self.sampled.append(np.full(len(ids), is_sampled))
        self.lp_raw.append(lp_raw)
        self.lp_behaviour.append(lp_behaviour)
        self.versions.append(versions)
        self.kept_counts.append(counts)
        self.kept_ids.append(kept)
        self.num_tokens += len(ids)
        self.num_sampled += len(ids) if is_sampled else 0

    def block(self, digest: str) -> Block:
        def joined(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
            array = np.concatenate([*parts, np.empty(0, dtype)]).astype(dtype, copy=False)
            array.setflags(write=False)
            return array

        offsets = np.concatenate([[0], np.cumsum(joined(self.kept_counts, np.int64))]).astype(np.int64)
        offsets.setflags(write=False)
        return Block(
            attempt_id=self.attempt_id,
            index=self.index,
            context_id=self.context_id,
            turn=self.turn,
            start=self.start,
            ids_T=joined(self.ids, np.int32),
            sampled_T=joined(self.sampled, np.bool_),
            lp_raw_T=joined(self.lp_raw, np.float32),
            lp_behaviour_T=joined(self.lp_behaviour, np.float32),
            version_T=joined(self.versions, np.int32),
            kept_ids_M=joined(self.kept_ids, np.int32),
            kept_offsets=offsets,
            routes_TLK=self._routes(),
            prefills=tuple(self.prefills),
            digest=digest,
        )

    def _routes(self) -> np.ndarray | None:
        if not self.routes:
            return None
        _, layers, k = self.routes[0][1].shape
        routes = np.full((self.num_tokens, layers, k), ABSENT_ROUTE, np.uint16)
        for first, part in self.routes:
            routes[first : first + len(part)] = part
        routes.setflags(write=False)
        return routes

    def ref(self, offset: int, size: int, digest: str) -> BlockRef:
        return BlockRef(
            attempt_id=self.attempt_id,
            index=self.index,
            context_id=self.context_id,
            turn=self.turn,
            start=self.start,
            num_tokens=self.num_tokens,
            num_sampled=self.num_sampled,
            offset=offset,
            size=size,
            digest=digest,
        )


@dataclass(frozen=True, kw_only=True)
class LogContents:
    """What of a token log can be believed."""

    attempt_id: str | None
    blocks: tuple[Block, ...]
    refs: tuple[BlockRef, ...]
    unsealed: Block | None
    """Tokens of the turn that was open when the log ends; digest empty. For inspection and continuing, not training."""
    valid_bytes: int
    damage: str | None
    """Why reading stopped before the end of the file; None when every byte was good."""


def log_path(directory: Path, attempt_id: str) -> Path:
    """File of an attempt's token log."""
    if not attempt_id or not attempt_id.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ValueError(f"attempt id {attempt_id!r} cannot name a file: letters, digits, '-', '_' and '.' only")
    return directory / f"{attempt_id}{SUFFIX}"


def read_log(path: Path) -> LogContents:
    """Reads as far as the log can be believed: up to the first bad record, which `damage` describes."""
    data = path.read_bytes()
    blocks: list[Block] = []
    refs: list[BlockRef] = []
    attempt_id: str | None = None
    turn: TurnTokens | None = None
    offset = good = 0
    damage = None
    try:
        for at, kind, payload in _records(data, checked=True):
            if kind is Kind.log:
                attempt_id = _log_head(payload)
            elif kind is Kind.open:
                turn, offset = TurnTokens(attempt_id=attempt_id or "", **json.loads(payload)), at
            elif turn is None:
                raise BlockError(f"record of kind {kind.name} at byte {at} outside a turn")
            elif kind is Kind.seal:
                digest = hashlib.sha256(data[offset:at]).hexdigest()
                if digest != json.loads(payload)["digest"]:
                    raise BlockError(f"block {turn.index} does not match the digest of its seal")
                blocks.append(turn.block(digest))
                refs.append(turn.ref(offset, at - offset, digest))
                turn = None
            else:
                _apply(turn, kind, payload)
            good = at + HEAD.size + len(payload) + TAIL.size
    except BlockError as error:
        damage = f"{path.name}: {error}"
    if attempt_id is None and damage is None:
        damage = f"{path.name}: empty, not even a header"
    return LogContents(
        attempt_id=attempt_id,
        blocks=tuple(blocks),
        refs=tuple(refs),
        unsealed=None if turn is None else turn.block(""),
        valid_bytes=good,
        damage=damage,
    )


def read_block(directory: Path, ref: BlockRef) -> Block:
    """Reads one sealed block and checks its digest: the trainer's way in.

    Raises:
        BlockError: missing, short, or other bytes than were sealed.
    """
    path = log_path(directory, ref.attempt_id)
    name = f"block {ref.attempt_id}/{ref.index}"
    try:
        with path.open("rb") as file:
            file.seek(ref.offset)
            data = file.read(ref.size)
    except FileNotFoundError as error:
        raise BlockError(f"{name}: {path} is missing") from error
    except OSError as error:
        raise BlockError(f"{name}: {path} cannot be read ({error.strerror})") from error
    digest = hashlib.sha256(data).hexdigest()
    if len(data) != ref.size or digest != ref.digest:
        raise BlockError(f"{name} in {path}: expected {ref.size} bytes with sha256 {ref.digest[:12]}, got {len(data)} "
                         f"with {digest[:12]}")  # fmt: skip
    turn: TurnTokens | None = None
    # the digest covers every byte, so the chained checksum, whose seed lies before this block, adds nothing
    for _, kind, payload in _records(data, checked=False):
        if kind is Kind.open:
            turn = TurnTokens(attempt_id=ref.attempt_id, **json.loads(payload))
        elif turn is None:
            raise BlockError(f"{name}: offset {ref.offset} is not the start of a turn")
        else:
            _apply(turn, kind, payload)
    if turn is None or turn.ref(ref.offset, ref.size, digest) != ref:
        raise BlockError(f"{name}: its bytes are a turn other than the ledger says")
    return turn.block(digest)


def _apply(turn: TurnTokens, kind: Kind, payload: bytes) -> None:
    if kind is Kind.input:
        turn.add_input(np.frombuffer(payload, np.int32))
    elif kind is Kind.sampled:
        turn.add_sampled(payload)
    elif kind is Kind.prefill:
        turn.prefills.append(PrefillEntry.from_dict(json.loads(payload)))
    elif kind is Kind.routes:
        turn.add_routes(payload)
    else:
        raise BlockError(f"a record of kind {kind.name} inside a turn")


def _log_head(payload: bytes) -> str:
    head = json.loads(payload)
    if head["format"] != FORMAT:
        raise BlockError(f"token log format {head['format']}, this version reads {FORMAT}")
    return head["attempt_id"]


def _records(data: bytes, *, checked: bool) -> Iterator[tuple[int, Kind, bytes]]:
    """(offset, kind, payload) of each record; raises BlockError at the first that cannot be believed."""
    at = crc = 0
    while at < len(data):
        if at + HEAD.size > len(data):
            raise BlockError(f"torn record at byte {at}: {len(data) - at} bytes of a header")
        size, kind = HEAD.unpack_from(data, at)
        end = at + HEAD.size + size
        if end + TAIL.size > len(data):
            raise BlockError(f"torn record at byte {at}: {size} bytes announced, {len(data) - at - HEAD.size} there")
        if checked:
            crc = zlib.crc32(data[at:end], crc)
            if TAIL.unpack_from(data, end)[0] != crc:
                raise BlockError(f"bad checksum of the record at byte {at}")
        if kind not in Kind.__members__.values():
            raise BlockError(f"unknown record kind {kind} at byte {at}")
        yield at, Kind(kind), data[at + HEAD.size : end]
        at = end + TAIL.size
