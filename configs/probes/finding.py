"""What a probe of `burnish doctor` says. Knows no probe."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from burnish.configs.config import DoctorRun


class Status(StrEnum):
    """ok: as it should be. warn: runs, but worse or not as tested. fail: does not run; printed as FAIL."""

    ok = "ok"
    warn = "warn"
    fail = "FAIL"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The answer of one probe."""

    status: Status
    there: str
    """What is there, or what is missing."""
    todo: str = ""
    """What the user can do about it; empty when there is nothing to do."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One question to the machine."""

    name: str
    ask: Callable[[DoctorRun], Finding]
    """May raise anything and may hang: whoever asks makes a FAIL of both."""
    is_needed: Callable[[DoctorRun], bool] = lambda run: True
    """Whether its FAIL stops the quickstart."""


def ok(there: str) -> Finding:
    return Finding(status=Status.ok, there=there)


def warn(there: str, todo: str) -> Finding:
    return Finding(status=Status.warn, there=there, todo=todo)


def fail(there: str, todo: str) -> Finding:
    return Finding(status=Status.fail, there=there, todo=todo)
