"""The wheel ships what the tree holds: an editable install would hide a package that the wheel forgot."""

import tomllib
from pathlib import Path

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
        for root in ROOTS
        for path in (ROOT / root).rglob("*.py")
        if DATA not in path.parents
    }
    assert not {name: n for name, n in lengths.items() if n > 600}
