"""The protocol of a verifier, and finding one by name or import path."""

import importlib
from typing import Any, Protocol

from burnish.envs.errors import UserError
from burnish.envs.sandbox.base import Artifacts, SandboxFactory
from burnish.envs.task import Task
from burnish.verifiers.types import Verdict

BUILT_IN = {"hidden_tests": "burnish.verifiers.hidden_tests:HiddenTests"}


class Verifier(Protocol):
    """Grades artifacts of a task. Thread-safe."""

    def verify(self, task: Task, artifacts: Artifacts, *, run_id: str, attempt_id: str) -> Verdict:
        """Raises:
        VerifierError: no valid verdict could be reached (outcome `verifier_failed`, never reward 0).
        SandboxError: the infrastructure failed.
        """
        ...


def load_verifier(spec: str, sandboxes: SandboxFactory) -> Verifier:
    """Makes the verifier that `spec` names.

    Args:
        spec: a built-in name (`hidden_tests`) or `package.module:Class`; the class is called with `sandboxes`.

    Raises:
        UserError: saying which part of `spec` does not resolve.
    """
    path = BUILT_IN.get(spec, spec)
    module_name, colon, class_name = path.partition(":")
    if not colon or not module_name or not class_name:
        names = ", ".join(sorted(BUILT_IN))
        raise UserError(f"verifier {spec!r} is neither a built-in ({names}) nor an import path `package.module:Class`")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # a module that the plug-in itself fails to import is its author's traceback, not a misspelt path
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        raise UserError(f"verifier {spec!r}: no module named {error.name!r} can be imported") from None
    if not hasattr(module, class_name):
        raise UserError(f"verifier {spec!r}: module {module_name!r} has no {class_name!r}")
    factory: Any = getattr(module, class_name)
    if not isinstance(factory, type) or not callable(getattr(factory, "verify", None)):
        raise UserError(f"verifier {spec!r}: {class_name!r} is not a class with a verify(task, artifacts, ...) method")
    verifier: Any = factory(sandboxes)
    return verifier
