"""Problems of the package reasoning-gym, an optional extra: its families by name, gated problems, and its own scorers.

A problem is kept only when the package scores the problem's own answer 1 and an empty one less, with the entry as it comes
back from the prompt file. A few of its families never do (they have no answer of their own), and are told so.
"""

import difflib
import json
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

from burnish.envs.errors import UserError

EXTRA = "reasoning-gym"
TRIES_A_PROBLEM, FURTHER_TRIES = 3, 20
"""Candidates that may be looked at for each problem that is wanted, and beside that."""
TUPLE, SET, PAIRS = "__tuple__", "__set__", "__pairs__"


def package() -> Any:
    """The package.

    Raises:
        UserError: it is not installed.
    """
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise UserError(f"the package reasoning_gym is not installed: pip install 'burnish[{EXTRA}]'") from None
    return reasoning_gym


def family_names() -> list[str]:
    """Every family that the package registers."""
    package()
    from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]

    return sorted(DATASETS)


def check_families(names: list[str]) -> None:
    """Raises:
    UserError: no such family; names the nearest ones.
    """
    known = family_names()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3, 0.5)
            near += [other for other in known if name in other and other not in near][:3]
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise UserError(f"families: reasoning_gym has no family {name!r}; {hint}")


def make_family(name: str, **options: Any) -> Any:
    """A data set of one family.

    Raises:
        UserError: the family does not take these options.
    """
    try:
        return package().create_dataset(name, **options)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        given = {key: value for key, value in options.items() if key not in ("seed", "size")}
        raise UserError(
            f"family {name} of reasoning_gym with options {given}: {error or type(error).__name__}"
        ) from None


def problems_of(
    name: str, wanted: int, seed: int, options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Up to `wanted` different problems that pass the gate, as records of a prompt file; and why others did not.

    Raises:
        UserError: see `make_family`.
    """
    tries = wanted * TRIES_A_PROBLEM + FURTHER_TRIES
    family = make_family(name, seed=seed, size=tries, **options)
    records: list[dict[str, Any]] = []
    seen: set[str] = set()
    rejected: Counter[str] = Counter()
    for index in range(tries):
        if len(records) == wanted:
            break
        entry = family[index]
        fault = "the same problem twice" if entry["question"] in seen else fault_of(name, entry, options)
        if fault:
            rejected[fault] += 1
            continue
        seen.add(entry["question"])
        records.append(
            {
                "prompt": entry["question"],
                "answer": entry["answer"],
                "data_source": name,
                "entry": packed(entry),
                "options": dict(options),
            }
        )
    return records, rejected


def fault_of(name: str, entry: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Why a problem cannot be used; empty when it can."""
    if not isinstance(entry["question"], str) or not entry["question"].strip():
        return "no question"
    if not isinstance(entry["answer"], str) or not entry["answer"].strip():
        return "no answer of its own"
    try:
        stored = json.loads(json.dumps(packed(entry), allow_nan=False))
    except (TypeError, ValueError):
        return "values that JSON does not hold"
    try:
        own, nothing = (score_text(name, text, stored, options) for text in (entry["answer"], ""))
    except Exception as error:  # noqa: BLE001 a scorer that is not ours
        return f"its scorer raises {type(error).__name__}"
    if own < 1:
        return "its own answer does not score 1"
    return "" if nothing < 1 else "an empty answer scores 1"


def score_text(name: str, text: str, entry: Any, options: Mapping[str, Any]) -> float:
    """The package's own score of an answer.

    Args:
        entry: as it is stored in the prompt file.
    """
    family = _scorer(name, json.dumps(options, sort_keys=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(family.score_answer(text, unpacked(entry)))


@cache
def _scorer(name: str, options: str) -> Any:
    return make_family(name, seed=0, size=1, **json.loads(options))


def packed(value: Any) -> Any:
    """For JSON, without making lists of tuples or text of keys: scorers tell them apart."""
    if isinstance(value, tuple):
        return {TUPLE: [packed(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {SET: sorted((packed(item) for item in value), key=repr)}
    if isinstance(value, list):
        return [packed(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: packed(item) for key, item in value.items()}
        return {PAIRS: [[packed(key), packed(item)] for key, item in value.items()]}
    return value


def unpacked(value: Any) -> Any:
    """The reverse of `packed`."""
    if isinstance(value, list):
        return [unpacked(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if TUPLE in value:
        return tuple(unpacked(item) for item in value[TUPLE])
    if SET in value:
        return {unpacked(item) for item in value[SET]}
    if PAIRS in value:
        return {unpacked(key): unpacked(item) for key, item in value[PAIRS]}
    return {key: unpacked(item) for key, item in value.items()}
