"""Hidden tests: each function called test_* is one; the reward is 1 when all of them pass, else 0.

Runs on what the agent left at the paths of `artifacts` (task.toml). Read it; never run or import it. An error other than a
failed assertion leaves no reward behind, which counts as a failed verifier and is tried again, never as 0.
"""

import json
import sys
from pathlib import Path


def test_count_is_right(app: Path) -> None:
    assert text(app / "count.txt").strip() == "3"


def test_words_are_as_they_were(app: Path) -> None:
    assert text(app / "words.txt") == "amber\nfalcon\nriver\n"


# ---- below: how the tests are run; a new task changes what is above


def text(path: Path) -> str:
    """Content of a regular file that holds text; anything else fails the test."""
    assert path.is_file(), f"{path.name} is missing"
    assert not path.is_symlink(), f"{path.name} is a link"
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        raise AssertionError(f"{path.name} is not text") from None


def main(app: Path, logs: Path) -> None:
    tests = {name: test for name, test in globals().items() if name.startswith("test_")}
    states: dict[str, str] = {}
    for name, test in tests.items():
        try:
            test(app)
            states[name] = "passed"
        except AssertionError as failure:
            states[name] = "failed"
            sys.stdout.write(f"{name}: {failure}\n")
    report = [{"name": name, "status": status, "duration": 0} for name, status in states.items()]
    has_passed = bool(states) and set(states.values()) == {"passed"}
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "ctrf.json").write_text(json.dumps({"results": {"tool": {"name": "check.py"}, "tests": report}}))
    (logs / "reward.txt").write_text("1\n" if has_passed else "0\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
