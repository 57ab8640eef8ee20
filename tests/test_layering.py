"""Lower layers never import higher ones; imports inside functions count too. envs and configs load without torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "envs": set(),
    "policy": {"kernels"},
    "verifiers": {"envs"},
    "rollout": {"policy", "envs", "verifiers"},
    "sft": {"policy"},
    "distill": {"policy", "envs", "verifiers", "rollout"},
    "configs": {"policy", "envs", "verifiers", "rollout", "sft", "distill"},
}
# only these may import burnish.configs
ENTRYPOINTS = {
    "rollout/train.py",
    "rollout/evaluate.py",
    "rollout/audit.py",
    "sft/train.py",
    "sft/pretrain.py",
    "distill/train.py",
    "policy/parity.py",
    "policy/initialize.py",
    "policy/inference/server.py",
    "envs/synthesis/pipeline.py",
    "envs/sandbox/reap.py",
}
# kernels/ and policy/ must import on a bare GPU machine that has torch and little else
NOT_AT_IMPORT = {"ray", "deepspeed", "hydra", "omegaconf", "wandb", "docker", "transformers", "datasets"}
DATA = ROOT / "envs" / "tasks"


def sources(layer: str) -> list[Path]:
    return [path for path in sorted((ROOT / layer).rglob("*.py")) if DATA not in path.parents]


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        prefix = "." * node.level + (node.module or "")
        return [f"{prefix}.{a.name}" for a in node.names] if prefix == "burnish" else [prefix]
    return []


def imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        yield from ((node.lineno, name) for name in imported(node) if isinstance(node, ast.Import | ast.ImportFrom))


def module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run at import: everything outside functions and `if TYPE_CHECKING`."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        yield node
        pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        if isinstance(node, ast.Try):
            pending += [child for handler in node.handlers for child in handler.body]


def violation(layer: str, rel: str, name: str) -> str | None:
    head, *rest = name.split(".")
    if head == "":
        return "relative import"
    if head in ("policy", "rollout", "envs", "sft", "distill", "configs"):
        return f"bare import, write burnish.{name}"
    if head != "burnish" or not rest or rest[0] == layer or rest[0] in MAY_IMPORT[layer]:
        return None
    if rest[0] == "configs" and rel in ENTRYPOINTS:
        return None
    return f"{layer} may not import {rest[0]}"


def test_imports_point_downwards():
    found = [
        f"{rel}:{line}: {why}"
        for layer in MAY_IMPORT
        for path in sources(layer)
        for rel in [path.relative_to(ROOT).as_posix()]
        for line, name in imports(path)
        if (why := violation(layer, rel, name))
    ]
    assert not found, "\n" + "\n".join(found)


def test_a_violation_is_seen():
    assert violation("kernels", "kernels/x.py", "burnish.policy.model") == "kernels may not import policy"
    assert violation("sft", "sft/data.py", "burnish.configs.schema") == "sft may not import configs"
    assert violation("sft", "sft/train.py", "burnish.configs.schema") is None
    assert violation("policy", "policy/x.py", "kernels.moe") is None  # Hugging Face's library of that name
    assert violation("policy", "policy/x.py", "rollout.types") == "bare import, write burnish.rollout.types"


def test_kernels_and_policy_import_on_a_bare_gpu_machine():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: import {name} inside the function that needs it"
        for layer in ("kernels", "policy")
        for path in sources(layer)
        for node in module_level(ast.parse(path.read_text()))
        for name in imported(node)
        if name.split(".")[0] in NOT_AT_IMPORT
        # a config.py names omegaconf's MISSING, and the server is an HTTP program of its own
        and not (path.name == "config.py" and name.split(".")[0] == "omegaconf")
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("kind", ["envs", "config.py"])
def test_stays_torch_free(kind):
    paths = sources("envs") if kind == "envs" else [p for layer in MAY_IMPORT for p in sources(layer) if p.name == kind]
    modules = ["burnish." + ".".join(p.relative_to(ROOT).with_suffix("").parts) for p in paths]
    assert modules
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name + " loads torch"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
