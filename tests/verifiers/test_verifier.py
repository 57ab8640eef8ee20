"""Finding a verifier by name or import path, and saying which part does not resolve."""

import sys

import pytest

from burnish.envs.config import SandboxConfig
from burnish.envs.errors import UserError
from burnish.envs.sandbox.local import LocalSandboxes
from burnish.verifiers.hidden_tests import HiddenTests
from burnish.verifiers.types import Outcome
from burnish.verifiers.verifier import load_verifier

PLUG_IN = """
class Always:
    def __init__(self, sandboxes):
        self.sandboxes = sandboxes
    def verify(self, task, artifacts, *, run_id, attempt_id):
        return "a verdict"
class Nothing:
    pass
def function(sandboxes):
    return None
"""


@pytest.fixture
def factory():
    return LocalSandboxes(SandboxConfig())


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    (tmp_path / "my_plug_in.py").write_text(PLUG_IN)
    (tmp_path / "my_broken.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("my_plug_in", "my_broken"):
        sys.modules.pop(name, None)


def test_the_built_in_name_and_an_import_path_resolve(factory, plug_in):
    assert isinstance(load_verifier("hidden_tests", factory), HiddenTests)
    assert isinstance(load_verifier("burnish.verifiers.hidden_tests:HiddenTests", factory), HiddenTests)
    mine = load_verifier("my_plug_in:Always", factory)
    assert mine.sandboxes is factory


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("hiden_tests", r"neither a built-in \(hidden_tests\) nor an import path"),
        ("my_plug_in:", "neither a built-in"),
        (":Always", "neither a built-in"),
        ("no_such_module:Always", "no module named 'no_such_module'"),
        ("my_plug_in.sub:Always", "no module named 'my_plug_in.sub'"),
        ("my_plug_in:Alway", "module 'my_plug_in' has no 'Alway'"),
        ("my_plug_in:Nothing", "not a class with a verify"),
        ("my_plug_in:function", "not a class with a verify"),
    ],
)
def test_what_does_not_resolve_is_named(factory, plug_in, spec, expected):
    with pytest.raises(UserError, match=expected):
        load_verifier(spec, factory)


def test_a_fault_inside_the_plug_in_stays_its_own(factory, plug_in):
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_verifier("my_broken:Always", factory)


def test_only_three_outcomes_carry_a_reward():
    carrying = {outcome.value for outcome in Outcome if outcome.has_reward}
    assert carrying == {"finished", "budget_exhausted", "agent_crashed_env"}
