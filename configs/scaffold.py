"""burnish new KIND NAME: a task, verifier or harness that runs as it is, made from the files in templates/.

The templates are code that is linted, typed and tested where it lies; only names are replaced. Nothing is overwritten.
"""

import importlib.util
import keyword
import re
import shutil
import sys
from pathlib import Path

from burnish.configs.config import Kind, NewRun
from burnish.envs.errors import UserError
from burnish.policy.checkpoint.whole_files import write_text

TEMPLATES = Path(__file__).with_name("templates")
TASK_FILES = {
    "task.toml": "task.toml",
    "instruction.md": "task_instruction.md",
    "environment/Dockerfile": "task_Dockerfile",
    "environment/files/words.txt": "task_words.txt",
    "solution/solve.sh": "task_solve.sh",
    "tests/test.sh": "task_test.sh",
    "tests/check.py": "task_check.py",
}
"""Path in the task folder -> template."""
KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
MAX_NAME = 100
"""Characters; folders of runs and containers carry the name."""


def main(run: NewRun) -> int:
    """Makes it and says what to do with it."""
    text = new_task(run) if run.kind is Kind.task else new_module(run)
    sys.stdout.write(text)
    return 0


def new_task(run: NewRun) -> str:
    """A task folder `<out>/<name>`; returns what to tell the user.

    Raises:
        UserError: the name is not kebab-case, or is taken.
    """
    check_name(run.name, KEBAB, "kebab-case: lower-case letters and digits, parts joined by single hyphens", "-")
    parent = Path(run.out or "tasks")
    target = parent / run.name
    refuse_taken(target)
    building = parent / f".building-{run.name}"
    shutil.rmtree(building, ignore_errors=True)
    for relative, template in TASK_FILES.items():
        path = building / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((TEMPLATES / template).read_text("utf-8").replace("TASK-NAME", run.name), "utf-8")
        if path.suffix == ".sh":
            path.chmod(0o755)
    building.rename(target)
    return (
        f"{target}: {', '.join(TASK_FILES)}\n"
        f"the oracle must pass: burnish eval tasks={parent} agent=oracle\n"
        f"doing nothing must not: burnish eval tasks={parent} agent=nop\n"
    )


def new_module(run: NewRun) -> str:
    """`<out>/<name>.py` with its class, and a test file beside it; returns what to tell the user.

    Raises:
        UserError: the name is no identifier in snake_case, or is taken, here or by something that is installed.
    """
    kind = run.kind.value
    check_name(run.name, SNAKE, "a Python module in snake_case: a letter, then letters, digits and single _", "_")
    if keyword.iskeyword(run.name) or run.name.startswith("test_"):
        raise UserError(f"{kind} name {run.name!r} cannot be a module of its own: give another one")
    folder = Path(run.out or "plugins")
    module, test = folder / f"{run.name}.py", folder / f"test_{run.name}.py"
    for path in (module, test):
        refuse_taken(path)
    if importlib.util.find_spec(run.name) is not None:
        raise UserError(f"{kind} name {run.name!r} is that of a module that can be imported already: give another one")
    class_name = "".join(part.capitalize() for part in run.name.split("_"))
    folder.mkdir(parents=True, exist_ok=True)
    for path, template in ((test, f"test_{kind}.py"), (module, f"{kind}.py")):
        text = (TEMPLATES / template).read_text("utf-8")
        text = text.replace(f"burnish.configs.templates.{kind}", run.name)
        write_text(path, text.replace(f"New{kind.capitalize()}", class_name))
    spec = f"{run.name}:{class_name}"
    return (
        f"{module}: class {class_name}; {test}: its tests\n"
        f"test it: PYTHONPATH={folder} python -m pytest {test}\n"
        f"use it: PYTHONPATH={folder} burnish eval tasks=DIR agent=oracle {kind}={spec}\n"
    )


def check_name(name: str, form: re.Pattern[str], expected: str, joint: str) -> None:
    """Raises UserError where a name is not of the form; shows what it could be."""
    if form.fullmatch(name) and len(name) <= MAX_NAME:
        return
    near = re.sub(r"[^a-z0-9]+", joint, name.lower()).strip(joint)[:MAX_NAME]
    near = near if joint == "-" else near.lstrip("0123456789_")
    hint = f", such as {near!r}" if form.fullmatch(near) else ""
    raise UserError(f"name {name!r} must be {expected}, at most {MAX_NAME} characters{hint}")


def refuse_taken(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise UserError(f"{path} is there already, and nothing is overwritten: give another name or out=DIR")
