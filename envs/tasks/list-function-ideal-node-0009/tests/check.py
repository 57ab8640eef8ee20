"""Hidden tests of a generated task: compare the files that left the sandbox with the state they must be in.

Runs in the verifier's own container on declared artifacts only. Where candidate.py lies beside it, functions in the files
are called as well. Each assertion is one test of the CTRF report; the reward is 1 when all pass, else 0. An error leaves
no reward behind, which is a failed verifier and never a 0.
"""

import importlib
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE_MAX_BYTES = 64 << 10
SOURCES_MAX = 100


def content(path: Path) -> str | None:
    """The text without its final newline; None where no regular file is, or one that is not text."""
    if path.is_symlink() or not path.is_file():
        return None
    try:
        return path.read_bytes().decode().removesuffix("\n")
    except UnicodeDecodeError:
        return None


def sources(workdir: Path) -> dict[str, str]:
    """Texts of the Python files that could be imported there, by module name."""
    paths = [path for path in sorted(workdir.glob("*.py")) if path.stem.isidentifier()][:SOURCES_MAX]
    texts = {path.stem: content(path) for path in paths if path.stat().st_size <= SOURCE_MAX_BYTES}
    return {name: text for name, text in texts.items() if text is not None}


def function_results(workdir: Path) -> dict[str, bool]:
    """Of the functions that the task asks for, if it asks for any."""
    if not (HERE / "candidate.py").exists():
        return {}
    sys.path.insert(0, str(HERE))
    return importlib.import_module("candidate").results(sources(workdir), HERE / "functions.json")


def main(workdir: Path, logs: Path) -> None:
    started_ms = int(time.time() * 1000)
    state = json.loads((HERE / "expected.json").read_text())
    results = {
        f"{path} holds what it must": content(workdir / path) == text.removesuffix("\n")
        for path, text in state["files"].items()
    }
    results |= {f"{path} is gone": content(workdir / path) is None for path in state["absent"]}
    results |= function_results(workdir)
    passed = sum(results.values())
    report = {
        "results": {
            "tool": {"name": "check.py"},
            "summary": {
                "tests": len(results),
                "passed": passed,
                "failed": len(results) - passed,
                "pending": 0,
                "skipped": 0,
                "other": 0,
                "start": started_ms,
                "stop": int(time.time() * 1000),
            },
            "tests": [
                {"name": name, "status": "passed" if ok else "failed", "duration": 0} for name, ok in results.items()
            ],
        }
    }
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "ctrf.json").write_text(json.dumps(report))
    (logs / "reward.txt").write_text("1\n" if passed == len(results) > 0 else "0\n")
    for name, ok in results.items():
        sys.stdout.write(f"{'PASSED' if ok else 'FAILED'} {name}\n")


if __name__ == "__main__":
    main(workdir=Path(sys.argv[1]), logs=Path(sys.argv[2]))
