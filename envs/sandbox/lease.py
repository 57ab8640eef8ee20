"""Who owns a sandbox, in a form that outlives the owner: a dead driver cannot clean up, so others must be able to tell.

A process is named by machine, boot, process-id namespace, id and start time, so a reused id is not taken for the owner. Where
liveness cannot be told (another machine, another namespace), only the lease's end counts.
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else "unknown"


def pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink()).removeprefix("pid:")
    except OSError:
        return "unknown"


def start_time(pid: int) -> str | None:
    """Clock ticks after boot at which the process started; None when it is gone, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def driver_identity() -> str:
    """Names this process; hand it on (`SandboxConfig.driver`) to processes that make sandboxes for this one."""
    pid = os.getpid()
    return "/".join([socket.gethostname(), boot_id(), pid_namespace(), str(pid), start_time(pid) or "unknown"])


def is_alive(identity: str) -> bool | None:
    """None when that cannot be told from here."""
    try:
        host, boot, namespace, pid, started = identity.split("/")
        number = int(pid)
    except ValueError:
        return None
    if "unknown" in (boot, namespace, started) or host != socket.gethostname():
        return None
    if boot != boot_id():
        return False
    return None if namespace != pid_namespace() else start_time(number) == started


def labels(*, run_id: str, attempt_id: str, role: str, driver: str, lease_s: float) -> dict[str, str]:
    return {
        "burnish": "1",
        "burnish.run": run_id,
        "burnish.attempt": attempt_id,
        "burnish.role": role,
        "burnish.lease": str(int(time.time() + lease_s)),
        "burnish.driver": driver or driver_identity(),
    }


def is_orphan(owner: Mapping[str, str], now: float) -> bool:
    """True when the labels say that nobody will come back for it."""
    lease = owner.get("burnish.lease", "")
    if lease.isdigit() and int(lease) < now:
        return True
    return is_alive(owner.get("burnish.driver", "")) is False
