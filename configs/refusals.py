"""Which errors are the user's to mend, and their one sentence; every other error is ours and keeps its traceback.

A ValueError says itself what is wrong. What the system refuses (a path, a full disk, a port) is put into words here, also
where a library or another process wraps it.
"""

import errno
from collections.abc import Iterator

ADVICE = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of the path is a file; give another path",
    errno.EISDIR: "a file is expected there",
    errno.EEXIST: "a folder is expected there; give another path or remove it",
    errno.EACCES: "give a path that this user may use, or change its permissions",
    errno.EPERM: "give a path that this user may use, or change its permissions",
    errno.EROFS: "give a path that can be written",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ELOOP: "the links lead in a circle",
    errno.ENOSPC: "free some space, then give the same command again",
    errno.EDQUOT: "free some space, then give the same command again",
    errno.ETXTBSY: "another process holds it",
}
# how libraries that take memory or write files themselves say that there is no more
MEMORY_FULL = ("DefaultCPUAllocator: can't allocate memory", "CUDA out of memory")
DISK_FULL = ("No space left on device", "database or disk is full", "PytorchStreamWriter failed", "inline_container.cc")


def sentence_of(error: BaseException) -> str | None:
    """What to tell the user, in one line; None where the error is ours."""
    if isinstance(error, BaseExceptionGroup):
        # tasks side by side: one of ours among them is the news
        sentences = [sentence_of(inner) for inner in error.exceptions]
        return None if None in sentences else sentences[0]
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception) and type(error).__name__.startswith("RayTaskError"):
        # an error that crossed Ray speaks with its cause's words
        return sentence_of(cause)
    for inner in chain(error):
        if getattr(inner, "errno", None) != errno.ENOSPC and any(text in str(inner) for text in DISK_FULL):
            return f"the disk is full ({one_line(str(inner))}); {ADVICE[errno.ENOSPC]}"
        if isinstance(inner, MemoryError) or any(text in str(inner) for text in MEMORY_FULL):
            return f"not enough memory ({one_line(str(inner))}); give a smaller policy, batch or engine"
    if isinstance(error, OSError) and error.errno is not None:
        advice = ADVICE.get(error.errno)
        if advice is None:
            return None
        where = f"{name_of(error.filename)}: " if error.filename is not None else ""
        return one_line(f"{where}{(error.strerror or '').lower()}; {advice}")
    if isinstance(error, ValueError | FileNotFoundError):
        return one_line(str(error)) or type(error).__name__
    return None


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def name_of(path: object) -> str:
    return path.decode(errors="backslashreplace") if isinstance(path, bytes) else str(path)


def one_line(text: str) -> str:
    return " ".join(text.split())
