"""The wheel ships what the tree holds: an editable install would hide a package that the wheel forgot."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOTS = ("policy", "rollout", "envs", "verifiers", "distill", "sft", "configs", "kernels")
DATA = ROOT / "envs" / "tasks"  # task folders are data, shipped by package-data


def packages_on_disk() -> set[str]:
    folders = [ROOT / root for root in ROOTS if (ROOT / root).is_dir()]
    folders += [p for folder in list(folders) for p in folder.rglob("*/") if DATA not in p.parents]
    return {
        "burnish." + ".".join(p.relative_to(ROOT).parts)
        for p in folders
        if p.name != "__pycache__"
        and ((p == DATA and any(p.iterdir())) or any(p.glob("*.py")) or any(p.glob("*.yaml")))
    }


def test_pyproject_lists_every_package():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = pyproject["tool"]["setuptools"]["packages"]
    assert len(set(listed)) == len(listed), "pyproject.toml [tool.setuptools] packages lists a package twice"
    missing, extra = packages_on_disk() - set(listed), set(listed) - packages_on_disk()
    advice = [f'add the line  "{name}",' for name in sorted(missing)]
    advice += [f'remove the line  "{name}",' for name in sorted(extra)]
    assert not advice, "pyproject.toml, [tool.setuptools] packages:\n" + "\n".join(advice)


def test_roots_stay_namespace_packages():
    # hydra's pkg:// needs configs/__init__.py; any other root __init__ would shadow a library (kernels, verifiers)
    assert [root for root in ROOTS if (ROOT / root / "__init__.py").exists()] == ["configs"]


def test_source_files_stay_readable():
    # files under 400 lines is the aim, 600 never; a longer one holds two nouns
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for root in (*ROOTS, "tests")
        for path in (ROOT / root).rglob("*.py")
        if DATA not in path.parents
    }
    assert not {name: n for name, n in lengths.items() if n > 600}


@pytest.mark.parametrize("root", ROOTS)
def test_the_readme_of_a_folder_names_its_files_and_no_others(root):
    folder = ROOT / root
    table = [line for line in (folder / "README.md").read_text().splitlines() if line.startswith("|")]
    entries = [name for line in table for name in re.findall(r"`([\w/*-]+(?:\.py|\.yaml|\.sh|/))`", line)]
    entries = [name for name in entries if not name.startswith("tests/")]
    files = [p.relative_to(folder).as_posix() for suffix in ("py", "yaml", "sh") for p in folder.rglob(f"*.{suffix}")]
    files = [name for name in files if name != "__init__.py"]

    def holds(entry: str, name: str) -> bool:
        return name.startswith(entry) if entry.endswith("/") else fnmatch(name, entry)

    assert not [name for name in files if not any(holds(entry, name) for entry in entries)], "not in the README"
    assert not [entry for entry in entries if not any(holds(entry, name) for name in files)], "not in the tree"
