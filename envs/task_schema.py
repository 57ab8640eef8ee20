"""Every key of a Harbor `task.toml` (schema 1.0-1.4): its type, its range, and whether Burnish runs it yet.

Harbor ignores keys it does not know, so a misspelt limit is no limit there. Here each table is checked against this list: an
unknown key, a wrong type or a value out of range is an error that names file and key, and so is a key that Harbor knows but
Burnish cannot honour yet. Source: `envs.md` 1.1.
"""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Check = Callable[[Any], str | None]
"""Returns what was expected, or None when the value is fine."""

DAY_S = 86_400.0


def text(value: Any) -> str | None:
    return None if isinstance(value, str) and "\0" not in value else "a string"


def boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def number(low: float, high: float) -> Check:
    def check(value: Any) -> str | None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and math.isfinite(value) and low <= value <= high:
            return None
        return f"a number from {low:g} to {high:g}"

    return check


def integer(low: int, high: int) -> Check:
    def check(value: Any) -> str | None:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        return None if is_integer and low <= value <= high else f"a whole number from {low} to {high}"

    return check


def one_of(*names: str) -> Check:
    return lambda value: None if isinstance(value, str) and value in names else "one of " + ", ".join(names)


def list_of(check: Check) -> Check:
    def check_list(value: Any) -> str | None:
        if not isinstance(value, list):
            return "a list"
        return next((f"a list, each element {wrong}" for item in value if (wrong := check(item))), None)

    return check_list


def text_table(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "a table of strings"
    is_fine = all(name and "=" not in name and "\0" not in name and not text(item) for name, item in value.items())
    return None if is_fine else "a table of strings, names without ="


def any_table(value: Any) -> str | None:
    return None if isinstance(value, dict) else "a table"


def anything(value: Any) -> str | None:
    return None


def user(value: Any) -> str | None:
    return None if isinstance(value, str | int) and not isinstance(value, bool) else "a user name or number"


def artifact(value: Any) -> str | None:
    return None if isinstance(value, str | dict) else "a path or a table with `source`"


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of one table."""

    check: Check = text
    only: tuple[object, ...] | None = None
    """Values that Burnish can honour; None is all, empty is none yet."""
    table: str = ""
    """Name of the schema of a nested table."""


NOT_YET: tuple[object, ...] = ()
ROOT_USER = ("root", 0, "0")
SECONDS = number(0.001, 7 * DAY_S)
NETWORK = {
    "network_mode": Key(check=one_of("no-network", "public", "allowlist"), only=("no-network",)),
    "allowed_hosts": Key(check=list_of(text), only=([],)),
}

SCHEMAS: dict[str, dict[str, Key]] = {
    "": {
        "schema_version": Key(check=one_of("1.0", "1.1", "1.2", "1.3", "1.4")),
        "version": Key(check=one_of("1.0", "1.1", "1.2", "1.3", "1.4")),
        "source": Key(),
        "artifacts": Key(check=list_of(artifact)),
        "task": Key(check=any_table, table="task"),
        "metadata": Key(check=any_table),
        "agent": Key(check=any_table, table="agent"),
        "verifier": Key(check=any_table, table="verifier"),
        "environment": Key(check=any_table, table="environment"),
        "solution": Key(check=any_table, table="solution"),
        "steps": Key(check=anything, only=NOT_YET),
        "multi_step_reward_strategy": Key(check=one_of("mean", "final"), only=NOT_YET),
    },
    "task": {
        "name": Key(),
        "version": Key(),
        "description": Key(),
        "authors": Key(check=list_of(anything)),
        "keywords": Key(check=list_of(text)),
    },
    "agent": {"timeout_sec": Key(check=SECONDS), "user": Key(check=user, only=ROOT_USER), **NETWORK},
    "verifier": {
        "timeout_sec": Key(check=SECONDS),
        "env": Key(check=text_table),
        "user": Key(check=user, only=ROOT_USER),
        "environment_mode": Key(check=one_of("shared", "separate"), only=("separate",)),
        "environment": Key(check=any_table, table="environment"),
        "collect": Key(check=anything, only=([],)),
        **NETWORK,
    },
    "environment": {
        "build_timeout_sec": Key(check=SECONDS),
        "docker_image": Key(),
        "os": Key(check=one_of("linux", "windows"), only=("linux",)),
        "cpus": Key(check=number(0.01, 4096)),
        "memory_mb": Key(check=integer(6, 1 << 30)),
        "storage_mb": Key(check=integer(1, 1 << 40)),
        # legacy spellings, as Harbor still reads them: "2G"
        "memory": Key(),
        "storage": Key(),
        "gpus": Key(check=integer(0, 1024), only=(0,)),
        "gpu_types": Key(check=list_of(text), only=([],)),
        "tpu": Key(check=any_table, only=NOT_YET),
        "allow_internet": Key(check=boolean, only=(False,)),
        "env": Key(check=text_table),
        "workdir": Key(),
        "skills_dir": Key(only=NOT_YET),
        "mcp_servers": Key(check=list_of(any_table), only=([],)),
        "healthcheck": Key(check=any_table, only=NOT_YET),
        **NETWORK,
    },
    "solution": {"env": Key(check=text_table)},
    "artifact": {
        "source": Key(),
        "destination": Key(only=NOT_YET),
        "exclude": Key(check=list_of(text), only=([],)),
        "service": Key(only=("main",)),
    },
}


def faults(table: Mapping[str, object], schema: str = "", prefix: str = "") -> Iterator[str]:
    """Sentences without the file's name, one for each thing wrong in `table`, in the order written."""
    keys = SCHEMAS[schema]
    for name, value in table.items():
        where = f"{prefix}{name}"
        if name not in keys:
            near = difflib.get_close_matches(name, keys, n=1)
            hint = f", did you mean {prefix}{near[0]}?" if near else f"; known keys: {', '.join(sorted(keys))}"
            yield f"unknown key {where}{hint}"
            continue
        key = keys[name]
        if expected := key.check(value):
            yield f"{where} must be {expected}, got {shown(value)}"
        elif key.only is not None and not any(
            value == allowed and type(value) is type(allowed) for allowed in key.only
        ):
            supported = " or ".join(shown(allowed) for allowed in key.only)
            tail = f"; it runs {supported}" if supported else ""
            yield f"{where} = {shown(value)} is valid Harbor, but Burnish does not run it yet{tail}"
        elif key.table and isinstance(value, dict):
            yield from faults(value, key.table, f"{where}.")


def shown(value: object) -> str:
    return repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."


def parse_size_mb(value: str) -> int | None:
    """MiB of a legacy size such as "512M", "2G" or "2Gi"; None when it is not one."""
    number_part = value.strip().rstrip("iIbB")
    scale = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}.get(number_part[-1:].upper())
    if scale is None or not number_part[:-1].replace(".", "", 1).isdigit():
        return None
    size = float(number_part[:-1]) * scale
    return max(1, round(size)) if 0 < size < 1 << 40 else None
