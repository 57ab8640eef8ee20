"""Tar streams into and out of a sandbox. Reads into memory only, within caps: nothing is ever extracted to the host.

A sandbox's file tree is the agent's: it may hold links out of the tree, devices, FIFOs, sparse files of a terabyte or a million
names. Regular files and directories cross, permission bits without set-id; everything else is named as rejected.
"""

import io
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from burnish.envs.sandbox.base import ArtifactFile, Artifacts

MAX_NAME_BYTES = 4096
KINDS = {
    tarfile.SYMTYPE: "symbolic link",
    tarfile.LNKTYPE: "hard link",
    tarfile.FIFOTYPE: "FIFO",
    tarfile.CHRTYPE: "device",
    tarfile.BLKTYPE: "device",
    tarfile.GNUTYPE_SPARSE: "sparse file",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file for a sandbox."""

    content: bytes
    mode: int = 0o644


def read_entry(source: bytes | Path) -> Entry:
    """A file of ours, with the executable bit it has."""
    if isinstance(source, bytes):
        return Entry(content=source)
    return Entry(content=source.read_bytes(), mode=0o755 if source.stat().st_mode & 0o100 else 0o644)


def checked_name(name: str) -> str:
    """Raises:
    ValueError: `name` is no relative path below its destination.
    """
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\0" in name or str(pure) == ".":
        raise ValueError(f"not a relative path below the destination: {name!r}")
    return str(pure)


def pack(files: Mapping[str, Entry], directories: Iterable[str] = ()) -> bytes:
    """A tar with root as the owner; keys are absolute paths. Parents are left to whoever unpacks, so theirs stay as they are."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(directories):
            member = tarfile.TarInfo(checked_name(path.lstrip("/")))
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(member)
        for path, entry in sorted(files.items()):
            member = tarfile.TarInfo(checked_name(path.lstrip("/")))
            member.size, member.mode = len(entry.content), entry.mode
            tar.addfile(member, io.BytesIO(entry.content))
    return stream.getvalue()


class CapError(Exception):
    """The stream holds more than may be read."""


class BoundedStream(io.RawIOBase):
    """File-like view of a stream of chunks that ends after `limit` bytes."""

    def __init__(self, chunks: Iterable[bytes], limit: int) -> None:
        self.chunks = iter(chunks)
        self.left = limit
        self.buffer = bytearray()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if size is None or size < 0:
            raise ValueError("a size is needed")
        while len(self.buffer) < size and (chunk := next(self.chunks, b"")):
            self.left -= len(chunk)
            if self.left < 0:
                raise CapError
            self.buffer += chunk
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        return data


@dataclass(kw_only=True)
class Collector:
    """Gathers artifacts of several archives under one set of caps."""

    max_bytes: int
    max_files: int
    files: dict[str, ArtifactFile] = field(default_factory=dict)
    directories: dict[str, None] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    seen: int = 0

    def result(self) -> Artifacts:
        return Artifacts(
            files=tuple(self.files.values()),
            directories=tuple(self.directories),
            missing=tuple(self.missing),
            rejected=tuple(self.rejected),
        )

    def add_archive(self, chunks: Iterable[bytes], root: str) -> None:
        """Reads a tar whose members lie below the last component of the absolute path `root`, as the engine sends it."""
        parent = str(PurePosixPath(root).parent)
        # a header and padding are at most three blocks for a plain name; long names take more
        limit = self.max_bytes + self.max_files * (4 * 512 + MAX_NAME_BYTES)
        try:
            with tarfile.open(fileobj=BoundedStream(chunks, limit), mode="r|", errorlevel=2) as tar:
                for member in tar:
                    if not self.add_member(tar, member, parent, root):
                        return
        except CapError:
            self.reject(root, "more than the caps allow")
        except tarfile.TarError as error:
            self.reject(root, f"unreadable archive: {error}")

    def reject(self, path: str, why: str) -> None:
        if len(self.rejected) < self.max_files:
            self.rejected.append((path, why))

    def add_member(self, tar: tarfile.TarFile, member: tarfile.TarInfo, parent: str, root: str) -> bool:
        """False when the rest of the archive must not be read."""
        self.seen += 1
        if self.seen > self.max_files:
            self.reject(root, f"more than {self.max_files} files")
            return False
        name = member.name
        pure = PurePosixPath(name)
        path = str(PurePosixPath(parent) / pure)
        if name.startswith("/") or ".." in pure.parts or "\0" in name or not PurePosixPath(path).is_relative_to(root):
            self.reject(name, "leads out of its folder")
        elif len(path.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES:
            self.reject(path[:80], "name too long")
        elif member.isdir():
            self.directories[path] = None
        elif member.issparse() or not member.isreg():
            self.reject(path, KINDS.get(member.type, "not a regular file"))
        elif member.size > self.max_bytes:
            # its bytes would have to be read to skip it
            self.reject(path, f"larger than the {self.max_bytes} bytes that are left")
            return False
        elif path in self.files or path in self.directories:
            self.reject(path, "twice in the archive")
        elif any(str(above) in self.files for above in PurePosixPath(path).parents):
            self.reject(path, "below a file")
        else:
            self.add_file(path, member, tar)
        return True

    def add_file(self, path: str, member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
        stream = tar.extractfile(member)
        content = b"" if stream is None else stream.read(member.size)
        if len(content) != member.size:
            raise tarfile.ReadError("unexpected end of data")
        self.max_bytes -= len(content)
        self.files[path] = ArtifactFile(path=path, content=content, mode=member.mode & 0o777)
