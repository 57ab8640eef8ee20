"""Coding tasks ask for what their hidden tests want: an independent reading of the words, and every near miss fails."""

import random
import re

import pytest

from burnish.envs.config import Domain, SandboxConfig, SandboxKind
from burnish.envs.sandbox.base import ArtifactFile, Artifacts, open_sandboxes
from burnish.envs.synthesis.generate import DIFFICULTIES, families_of, generate
from burnish.envs.synthesis.spec import TaskSpec
from burnish.envs.synthesis.template.candidate import call_all
from burnish.envs.synthesis.write import write_task
from burnish.envs.task import load_task
from burnish.verifiers.hidden_tests import HiddenTests

FAMILIES = families_of(Domain.coding)
CASES = [(family, difficulty) for family in FAMILIES for difficulty in DIFFICULTIES]
SEEDS = range(25)


def specs(family: str, difficulty: int) -> list[TaskSpec]:
    return [generate(family, difficulty, random.Random(f"coding {seed}")) for seed in SEEDS]


def signed(words: str, names: dict[str, int]) -> int:
    """The value of `x times 4 minus 3` and the like, from left to right."""
    first, *rest = words.split()
    total = names[first] if first in names else int(first)
    for sign, operand in zip(rest[::2], rest[1::2], strict=True):
        number = names[operand] if operand in names else int(operand)
        total = {"plus": total + number, "minus": total - number, "times": total * number}[sign]
    return total


def of_list(words: str, a: list[int]) -> object:
    values = {
        "the largest item of a": sorted(a)[-1],
        "the smallest item of a": sorted(a)[0],
        "the sum of a": sum(a),
        "the length of a": sum(1 for _ in a),
        "the first item of a": next(iter(a)),
        "the last item of a": next(reversed(a)),
        "a in sorted order": sorted(a),
        "a in reverse order": list(reversed(a)),
    }
    if words in values:
        return values[words]
    for sign in (" plus ", " minus "):
        left, found, right = words.partition(sign)
        if found:
            other = values[right] if right in values else int(right)
            return values[left] + other if "plus" in sign else values[left] - other
    raise AssertionError(words)


def of_text(words: str, s: str) -> str:
    how, _, end = words.partition(" and then ")
    changed = {
        "s in upper case": "".join(letter.upper() for letter in s),
        "s in lower case": "".join(letter.lower() for letter in s),
        "s in title case": re.sub("[A-Za-z]+", lambda word: word[0][0].upper() + word[0][1:].lower(), s),
        "s without spaces around it": re.sub("^ *| *$", "", s),
        "s in reverse order": "".join(reversed(s)),
    }[how]
    return changed + (f" {end.removesuffix(' after a space')}" if end else "")


def meant(words: str, names: list[str], arguments: list) -> object:
    """What the words after `returns` or `as` say for these arguments."""
    if names == ["a"]:
        mapped = re.fullmatch(r"x (\w+) (\d+) for every x (?:over (\d+) )?in a", words)
        if mapped is None:
            return of_list(words, arguments[0])
        kept = [x for x in arguments[0] if mapped[3] is None or x > int(mapped[3])]
        return [signed(f"x {mapped[1]} {mapped[2]}", {"x": x}) for x in kept]
    if names == ["s"]:
        return of_text(words, arguments[0])
    values = dict(zip(names, arguments, strict=True))
    chosen = re.fullmatch(r"(.+) if (\w) (is over|is under|is) (\d+) else (.+)", words)
    if chosen is None:
        return signed(words, values)
    value, limit = values[chosen[2]], int(chosen[4])
    holds = {"is over": value > limit, "is under": value < limit, "is": value == limit}[chosen[3]]
    return signed(chosen[1] if holds else chosen[5], values)


REQUEST = re.compile(
    r"(?P<function>\w+_\w+) of (?P<names>\w(?: and \w)?) (?:to \w+\.py\. It returns|as) (?P<words>[^.]+)\."
)


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
@pytest.mark.parametrize(
    "family", ["write-function", "two-arguments", "text-function", "list-function", "map-items", "choose-value"]
)
def test_the_words_mean_what_the_tests_want(family, difficulty):
    found = 0
    for spec in specs(family, difficulty):
        tests = {test.name: test for test in spec.functions}
        for request in REQUEST.finditer(spec.instruction):
            test, names = tests[request["function"]], request["names"].split(" and ")
            if request["words"].startswith(tuple(tests)):
                continue  # in terms of another function of the task
            for arguments, value in test.cases:
                assert meant(request["words"], names, arguments) == value, (spec.instruction, arguments)
                found += 1
    assert found >= 3 * len(SEEDS)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("family", ["fix-operator", "fix-constant", "fix-call"])
def test_the_words_of_a_repair_mean_what_the_tests_want(family, level):
    for spec in specs(family, level):
        (test,) = spec.functions
        wanted = re.search(r"must return ([^.,]+)[.,]", spec.instruction)
        if wanted is None:
            assert "Change the number" in spec.instruction
            continue
        (name,) = {"a"} if " of a" in wanted[1] else set(re.findall(r"\b[xkzs]\b", wanted[1]))
        for arguments, value in test.cases:
            assert meant(wanted[1], [name], arguments) == value, (spec.instruction, arguments)


def values_of(spec: TaskSpec, sources: dict[str, str]) -> list[list]:
    calls = [[test.path[:-3], test.name, list(arguments)] for test in spec.functions for arguments, _ in test.cases]
    return call_all(sources, calls)


def sources_of(files: dict[str, bytes]) -> dict[str, str]:
    return {path[:-3]: content.decode() for path, content in files.items() if path.endswith(".py")}


NEAR_MISSES = [
    (r" \+ ", " - "), (r" \+ ", " * "), (r" - ", " + "), (r" \* ", " + "), (r" > ", " < "), (r" < ", " > "),
    (r" > ", " >= "), (r" < ", " <= "), (r" == ", " >= "), (r"max", "min"), (r"min", "max"), (r"sum", "max"), (r"len", "sum"),
    (r"\[0\]", "[-1]"), (r"\[-1\]", "[0]"), (r"\[::-1\]", ""), (r"sorted", "list"), (r"upper", "title"), (r"lower", "strip"),
    (r"title", "upper"), (r"strip", "lstrip"), (r"\d+(?!\d)", "1"), (r"return ", ""), (r"if x", "if not x"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "difficulty"), CASES)
def test_a_near_miss_is_not_what_the_tests_want(family, difficulty):
    """One change in one file that the oracle wrote: some call returns something else."""
    missed = 0
    for spec in specs(family, difficulty):
        right = sources_of(spec.expected)
        wanted = [["value", value] for test in spec.functions for _, value in test.cases]
        assert values_of(spec, right) == wanted
        for test in spec.functions:
            module = test.path[:-3]
            lines = right[module].splitlines()
            place = next(index for index, line in enumerate(lines) if line.startswith(f"def {test.name}("))
            for pattern, other in NEAR_MISSES:
                head, colon, body = lines[place].partition("): ")
                wrong = head + colon + re.sub(pattern, other, body, count=1)
                if wrong != lines[place]:
                    changed = "\n".join([*lines[:place], wrong, *lines[place + 1 :]])
                    assert values_of(spec, {**right, module: changed}) != wanted, (lines[place], wrong)
                    missed += 1
    assert missed >= len(SEEDS)


@pytest.mark.parametrize(("family", "difficulty"), CASES)
def test_the_start_is_not_what_the_tests_want(family, difficulty):
    for spec in specs(family, difficulty):
        right = [["value", value] for test in spec.functions for _, value in test.cases]
        untouched = sources_of(spec.files)
        assert spec.retired or values_of(spec, untouched) != right
        for path, name in spec.retired:
            assert name in untouched[path[:-3]]
            assert name not in spec.expected[path].decode()


@pytest.mark.parametrize(("family", "difficulty"), CASES)
def test_the_tests_call_with_values_that_the_instruction_does_not_have(family, difficulty):
    for spec in specs(family, difficulty):
        seen = spec.instruction + "".join(turn.output for turn in spec.turns)
        for test in spec.functions:
            literal = [rf"(?<![\w-]){re.escape(str(arguments[0]))}(?!\w)" for arguments, _ in test.cases]
            new = [pattern for pattern in literal if not re.search(pattern, seen)]
            assert len(new) >= 3, (spec.instruction, test)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_expected_values_are_nowhere_an_agent_looks(family, tmp_path):
    spec = specs(family, 2)[0]
    folder = write_task(spec, "some-task", tmp_path)
    given = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file() and "tests" not in path.parts)
    assert b'"returns"' not in given
    wanted = {path.name for path in (folder / "tests").iterdir()}
    assert wanted == {"candidate.py", "check.py", "expected.json", "functions.json", "test.sh"}
    # code that is judged by what it does is not compared as text
    assert not {test.path for test in spec.functions} & set(spec.fixed_files)


@pytest.fixture(scope="module")
def verifier():
    factory = open_sandboxes(SandboxConfig(), SandboxKind.local)
    yield HiddenTests(factory)
    factory.close()


def graded(verifier, spec: TaskSpec, files: dict[str, bytes], tmp_path) -> float:
    task = load_task(write_task(spec, "some-task", tmp_path))
    made = tuple(ArtifactFile(path=f"/app/{path}", content=content) for path, content in files.items())
    artifacts = Artifacts(files=made, directories=("/app",))
    return verifier.verify(task, artifacts, run_id="test", attempt_id="0").reward


def test_another_way_to_the_same_function_passes(verifier, tmp_path):
    spec = generate("rename-function", 2, random.Random("another"))
    (path, old), (renamed, caller) = spec.retired[0], spec.functions
    body = spec.expected[path].decode().splitlines()[0].partition("): ")[2]
    name = spec.expected[path].decode().partition("(")[2][0]
    sign = "*" if " * " in spec.expected[path].decode().splitlines()[1] else "+"
    text = f"{renamed.name} = lambda {name}: {body.removeprefix('return ')}\n\n\ndef {caller.name}(v):\n    w = {renamed.name}(v)\n    return w {sign} w\n"
    assert graded(verifier, spec, {path: text.encode()}, tmp_path) == 1.0
    assert graded(verifier, spec, {path: f"{text}{old} = {renamed.name}\n".encode()}, tmp_path) == 0.0
    assert graded(verifier, spec, {"elsewhere.py": text.encode()}, tmp_path) == 0.0


def test_an_untouched_module_must_stay_untouched(verifier, tmp_path):
    spec = generate("fix-import", 1, random.Random("library"))
    (library,) = spec.fixed_files
    assert graded(verifier, spec, spec.expected, tmp_path) == 1.0
    changed = {**spec.expected, library: spec.expected[library] + b"# mine\n"}
    assert graded(verifier, spec, changed, tmp_path) == 0.0
    without = {path: content for path, content in spec.expected.items() if path != library}
    assert graded(verifier, spec, without, tmp_path) == 0.0
