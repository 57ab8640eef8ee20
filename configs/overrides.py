"""Checks one override against the typed config before Hydra sees it.

Hydra alone accepts `++new.key=5` (and trains with the old value), `010` for a number and `1.7` for an integer. Here an
override must name a key that the schema has, and its value must be of the key's type as it is written. Knows nothing of
verbs or files.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from burnish.envs.errors import UserError

MAX_INTEGER = 2**63 - 1
"""No key needs more, and no library takes more for a seed or a size."""
_FORM = re.compile(r"(?P<prefix>\+\+|\+|~)?(?P<key>[^=\s]+?)(?P<assign>=(?P<value>.*))?", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Override:
    """`prefix key=value` as it was typed."""

    text: str
    prefix: str
    key: str
    value: str


def split(text: str) -> Override:
    """Cut an override into its parts.

    Raises:
        UserError: it is not of the form key=value, or deletes a key.
    """
    match = _FORM.fullmatch(text)
    if match is None or (match["assign"] is None and match["prefix"] != "~"):
        raise UserError(f"'{text}' is not an override: write key=value")
    if match["prefix"] == "~":
        raise UserError(f"'{text}': keys cannot be removed; every key of the schema has a value")
    return Override(text=text, prefix=match["prefix"] or "", key=match["key"], value=match["value"])


def check(override: Override, cfg: DictConfig) -> str:
    """Check one value override against the composed config; return the text that Hydra should get.

    Raises:
        UserError: unknown key, `+` on a key that exists, or a value that is not of the key's type.
    """
    kind = type_of(override.key, cfg)
    if override.prefix == "+" and not _is_new_dict_key(override.key, cfg):
        raise UserError(f"{override.key} already exists: write {override.key}={override.value} without '+'")
    if _bare(kind) is str:
        if override.value in ("", "''", '""') and override.key in OmegaConf.missing_keys(cfg):
            raise UserError(f"{override.key} must not be empty: give {override.key}=...")
        return f"{override.prefix}{override.key}={quoted(override.value)}"
    text = f"{override.prefix}{override.key}={override.value}"
    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise UserError(
            f"{override.key}: cannot read the value {override.value!r} ({_first_line(error)}); quote it"
        ) from error
    if parsed.is_sweep_override():
        raise UserError(f"{override.key}: expected one value, got {override.value!r}; write a list as [a,b]")
    value = parsed.value()
    _check_value(override.key, value, kind, override.value)
    if _bare(kind) is int and isinstance(value, float):
        return f"{override.prefix}{override.key}={int(value)}"  # OmegaConf takes no 1e6 for an integer
    return text


def leads_into_mapping(override: Override, cfg: DictConfig) -> bool:
    """Whether the key is, or lies in, a mapping of dataclasses: Hydra adds no entry to such a one, `merged` does."""
    parts = override.key.split(".")
    kinds = (_bare(type_of(".".join(parts[:end]), cfg)) for end in range(1, len(parts) + 1))
    return any(
        typing.get_origin(kind) is dict and dataclasses.is_dataclass(_bare(typing.get_args(kind)[1])) for kind in kinds
    )


def merged(cfg: DictConfig, texts: Sequence[str]) -> DictConfig:
    """The config with checked overrides that lead into mappings of dataclasses; an entry comes with its defaults.

    Args:
        texts: what `check` returned.
    """
    for text in texts:
        parsed = OverridesParser.create().parse_override(text)
        tree: Any = parsed.value()
        for part in reversed(str(parsed.key_or_group).split(".")):
            tree = {part: tree}
        with open_dict(cfg):
            cfg = typing.cast(DictConfig, OmegaConf.merge(cfg, tree))
    return cfg


def quoted(text: str) -> str:
    """`text` as a Hydra string, whatever characters it holds; null and text that is already quoted stay as they are."""
    if text in ("null", "???") or (len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""):
        return text
    # the grammar unescapes backslashes only before a quote or at the end of the text
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + (r"\'" if m[2] else ""), text)
    return f"'{escaped}'"


def type_of(key: str, cfg: DictConfig) -> Any:
    """The declared type of a dotted key; the composed node decides where a group chose a subclass.

    Raises:
        UserError: the schema has no such key; names the nearest one.
    """
    node: Any = cfg
    kind: Any = OmegaConf.get_type(cfg)
    for part in key.split("."):
        kind = _bare(kind)
        if dataclasses.is_dataclass(kind):
            kind = OmegaConf.get_type(node) if isinstance(node, DictConfig) and not node._is_none() else kind
            hints = typing.get_type_hints(kind)
            if part not in hints:
                raise unknown_key(key, cfg)
            kind = hints[part]
            node = node._get_node(part) if isinstance(node, DictConfig) and not node._is_none() else None
        elif typing.get_origin(kind) is dict:
            kind, node = typing.get_args(kind)[1], None
        else:
            raise unknown_key(key, cfg)
    return kind


def unknown_key(key: str, cfg: DictConfig) -> UserError:
    known = list(keys_of(OmegaConf.get_type(cfg)))
    last = key.split(".")[-1]
    near = [name for name in known if name.split(".")[-1] == last] or difflib.get_close_matches(key, known, 1, 0.6)
    near = near or [n for n in known if difflib.get_close_matches(last, [n.split(".")[-1]], 1, 0.75)]
    hint = f"did you mean '{near[0]}'?" if near else "--help lists the keys"
    return UserError(f"unknown key '{key}'; {hint}")


def keys_of(kind: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a dataclass, containers before what they hold."""
    for name, hint in typing.get_type_hints(kind).items():
        yield prefix + name
        if dataclasses.is_dataclass(_bare(hint)):
            yield from keys_of(_bare(hint), f"{prefix}{name}.")


def type_name(kind: Any) -> str:
    """How help and messages call a type."""
    bare = _bare(kind)
    if typing.get_origin(bare) is list:
        name = f"list of {type_name(typing.get_args(bare)[0])}"
    elif typing.get_origin(bare) is dict:
        name = "mapping"
    elif isinstance(bare, type) and issubclass(bare, Enum):
        name = "|".join(bare.__members__)
    else:
        name = {int: "integer", float: "number", bool: "true|false", str: "text"}.get(
            bare, getattr(bare, "__name__", "any")
        )
    return name if bare is kind else f"{name} or null"


def _bare(kind: Any) -> Any:
    """`T` of `T | None`."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        rest = [arg for arg in typing.get_args(kind) if arg is not type(None)]
        return rest[0] if len(rest) == 1 else Any
    return kind


def _check_value(key: str, value: Any, kind: Any, raw: str) -> None:
    """Raise where a parsed value is not of the declared type as written; `${...}` is left to OmegaConf."""
    bare = _bare(kind)
    if (value is None and bare is not kind) or bare is Any or (isinstance(value, str) and "${" in value):
        return
    if isinstance(value, list) and typing.get_origin(bare) is list:
        for i, item in enumerate(value):
            _check_value(f"{key}[{i}]", item, typing.get_args(bare)[0], str(item))
    elif isinstance(value, dict) and typing.get_origin(bare) is dict:
        for name, item in value.items():
            _check_value(f"{key}.{name}", item, typing.get_args(bare)[1], str(item))
    elif isinstance(value, dict) and dataclasses.is_dataclass(bare):
        hints = typing.get_type_hints(bare)
        for name, item in value.items():
            if name not in hints:
                raise UserError(f"unknown key '{key}.{name}'; the keys of {key} are {', '.join(hints)}")
            _check_value(f"{key}.{name}", item, hints[name], str(item))
    elif not _is_scalar_of(value, bare):
        raise UserError(f"{key}: expected {type_name(kind)}, got '{raw}'")


def _is_scalar_of(value: Any, bare: Any) -> bool:
    if bare in (int, float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # 1e6 is a fine way to write an integer, 1.7 is not
        return is_number and (bare is float or (value == value // 1 and abs(value) <= MAX_INTEGER))
    if isinstance(bare, type) and issubclass(bare, Enum):
        return isinstance(value, str) and value in bare.__members__
    return isinstance(bare, type) and isinstance(value, bare)


def _is_new_dict_key(key: str, cfg: DictConfig) -> bool:
    parent, _, last = key.rpartition(".")
    if not parent or typing.get_origin(_bare(type_of(parent, cfg))) is not dict:
        return False
    node = OmegaConf.select(cfg, parent)
    return node is None or last not in node


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
