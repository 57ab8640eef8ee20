"""Every checked-in YAML composes against its schema, and what a user gets wrong ends in one sentence that names it."""

import subprocess
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from burnish.configs import cli, overrides, schema
from burnish.configs.documentation import field_docs
from burnish.configs.verbs import VERBS
from burnish.envs.errors import UserError

CONFIGS = Path(__file__).parents[1] / "configs"


# ------------------------------------------------------------------ a small schema with every kind of field


class Colour(StrEnum):
    red = "red"
    blue = "blue"


@dataclass(kw_only=True)
class Optim:
    """The optimizer."""

    lr: float = 1e-6
    """Learning rate.

    A second paragraph.
    """


@dataclass(kw_only=True)
class Trainer:
    total_steps: int = 100
    """Optimizer steps."""
    save_freq: int = 10
    is_on: bool = False


@dataclass(kw_only=True)
class Toy:
    trainer: Trainer = field(default_factory=Trainer)
    optim: Optim = field(default_factory=Optim)
    path: str = MISSING
    """Where the data lies."""
    note: str | None = None
    limit: int | None = 3
    colour: Colour = Colour.red
    seeds: list[int] = field(default_factory=lambda: [1])
    env: dict[str, str] = field(default_factory=dict)
    stages: dict[str, Trainer] = field(default_factory=dict)


def override_toy(text: str) -> Toy:
    """What the command line does with one override, on the schema above."""
    ConfigStore.instance().store(name="toy", node=Toy)
    with initialize_config_module("burnish.configs", version_base="1.3"):
        base = hydra_compose("toy", ["path=p"])
        part = overrides.split(text)
        checked = overrides.check(part, base)
        if overrides.leads_into_mapping(part, base):
            return OmegaConf.to_object(overrides.merged(base, [checked]))  # pyright: ignore[reportReturnType]
        return OmegaConf.to_object(hydra_compose("toy", ["path=p", checked]))  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trainer.total_step=5", "unknown key 'trainer.total_step'; did you mean 'trainer.total_steps'?"),
        ("++trainer.total_step=5", "unknown key 'trainer.total_step'; did you mean 'trainer.total_steps'?"),
        ("+trainer.total_step=5", "unknown key 'trainer.total_step'"),
        ("++wholly.new=1", "unknown key 'wholly.new'"),
        ("total_steps=5", "unknown key 'total_steps'; did you mean 'trainer.total_steps'?"),
        ("trainer.save_freq.x=5", "unknown key 'trainer.save_freq.x'"),
        ("+trainer.save_freq=3", "trainer.save_freq already exists"),
        ("optim={lr:1e-5,wd:0.1}", "unknown key 'optim.wd'"),
        ("+env.HCA=[1,2]", None),  # a text field takes what was typed
        ("optim.lr=yes", "optim.lr: expected number, got 'yes'"),
        ("optim={lr:yes}", "optim.lr: expected number, got 'yes'"),
        ("optim=3", "optim: expected"),
        ("optim.lr=true", "optim.lr: expected number, got 'true'"),
        ("optim.lr='1e-3'", "optim.lr: expected number"),
        ("trainer.total_steps=010", "trainer.total_steps: expected integer, got '010'"),
        ("trainer.total_steps=1.7", "trainer.total_steps: expected integer, got '1.7'"),
        ("trainer.total_steps=nan", "trainer.total_steps: expected integer, got 'nan'"),
        ("trainer.total_steps=inf", "trainer.total_steps: expected integer, got 'inf'"),
        ("trainer.total_steps=null", "trainer.total_steps: expected integer, got 'null'"),
        ("trainer.total_steps=", "trainer.total_steps: expected integer, got ''"),
        ("trainer.total_steps=5,6", "trainer.total_steps: expected one value, got '5,6'"),
        ("trainer.total_steps=[5", "trainer.total_steps: cannot read the value '[5'"),
        ("trainer.is_on=yes", "trainer.is_on: expected true|false, got 'yes'"),
        ("seeds=[1,010]", "seeds[1]: expected integer, got '010'"),
        ("seeds=4", "seeds: expected list of integer, got '4'"),
        ("colour=green", "colour: expected red|blue, got 'green'"),
        ("stages.one.save_frq=1", "unknown key 'stages.one.save_frq'; did you mean 'trainer.save_freq'?"),
        ("stages.one.save_freq=1.5", "stages.one.save_freq: expected integer, got '1.5'"),
        ("stages={one:{save_frq:1}}", "unknown key 'stages.one.save_frq'; the keys of stages.one are total_steps"),
        ("+stages.one.save_freq=1", "write stages.one.save_freq=1 without '+'"),
        ("~trainer.save_freq", "keys cannot be removed"),
        ("trainer.save_freq", "'trainer.save_freq' is not an override: write key=value"),
    ],
)
def test_override_mistake_is_named(text, says):
    if says is None:
        override_toy(text)
        return
    with pytest.raises(UserError) as caught:
        override_toy(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("trainer.total_steps=1e3", "trainer.total_steps", 1000),
        ("++trainer.total_steps=7", "trainer.total_steps", 7),
        ("optim.lr=1", "optim.lr", 1.0),
        ("optim={lr:0.5}", "optim.lr", 0.5),
        ("limit=null", "limit", None),
        ("note=null", "note", None),
        ("note=010", "note", "010"),
        ("note=1e5", "note", "1e5"),
        ("note=a,b = {c} 'd\\", "note", "a,b = {c} 'd\\"),
        ("note=", "note", ""),
        ("trainer.is_on=true", "trainer.is_on", True),
        ("colour=blue", "colour", Colour.blue),
        ("seeds=[]", "seeds", []),
        ("stages.one.save_freq=1e3", "stages.one.save_freq", 1000),
        ("stages.one.save_freq=3", "stages.one.total_steps", 100),
        ("stages={one:{is_on:true},two:{}}", "stages.one.is_on", True),
        ("+env.HCA=mlx5_0:1,mlx5_3:1", "env.HCA", "mlx5_0:1,mlx5_3:1"),
    ],
)
def test_override_arrives_as_typed(text, key, value):
    found = override_toy(text)
    for part in key.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_field_docs_are_the_literals_under_the_fields():
    docs = field_docs(Toy)
    assert docs["path"] == "Where the data lies."
    assert docs["optim"] == "The optimizer."
    assert docs["optim.lr"] == "Learning rate."
    assert docs["trainer.is_on"] == ""


# ------------------------------------------------------------------ the verbs


def keys_of(verb: str) -> list[str]:
    return list(overrides.keys_of(VERBS[verb].config_class()))


# keys that have a default but that a plain run of the verb must still give
ALSO = {"eval": ["policy=given"], "rl": ["policy=given", "tasks=given"], "parity": ["dir=given"]}
# required keys that do not take any word
CHOICES = {"kind": "task"}


def values_for_required(verb: str) -> list[str]:
    """The least that a user must type."""
    cfg = schema.compose_tree(VERBS[verb], [])
    given = {f"{key}={CHOICES.get(key, 'given')}" for key in OmegaConf.missing_keys(cfg)}
    return sorted(given | set(ALSO.get(verb, [])))


def test_every_verb_has_a_yaml_and_every_yaml_a_verb():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_yaml_composes_to_its_dataclass(verb):
    config = schema.compose(verb, values_for_required(verb))
    assert type(config) is VERBS[verb].config_class()


@pytest.mark.parametrize("experiment", sorted(path.stem for path in CONFIGS.glob("experiment/*.yaml")))
def test_experiment_composes(experiment):
    plain, chosen = schema.compose("quickstart"), schema.compose("quickstart", [f"experiment={experiment}"])
    assert chosen != plain
    # what is typed wins over the experiment, in any order
    assert schema.compose("quickstart", ["name=mine", f"experiment={experiment}"]).name == "mine"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["quickstart", "experiment=smoek"], "experiment: no choice 'smoek'; choose from smoke"),
        (["reap", "experiment=smoke"], "unknown key 'experiment'"),
    ],
)
def test_wrong_choice_is_named(words, says, capsys):
    assert cli.main([*words, "--dry-run"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_entry_point_exists(verb):
    assert callable(VERBS[verb].entry_point())


@pytest.mark.parametrize("verb", VERBS)
def test_every_misspelt_key_is_named_with_the_right_one(verb):
    cfg = schema.compose_tree(VERBS[verb], [])
    for key in keys_of(verb):
        wrong = key + "x"
        with pytest.raises(UserError) as caught:
            overrides.check(overrides.split(f"{wrong}=1"), cfg)
        assert f"unknown key '{wrong}'; did you mean '" in str(caught.value)


@pytest.mark.parametrize("verb", VERBS)
def test_every_key_is_documented_by_help(verb, capsys):
    assert cli.main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    docs = field_docs(VERBS[verb].config_class())
    leaves = [key for key in keys_of(verb) if not any(other.startswith(f"{key}.") for other in keys_of(verb))]
    assert not [key for key in leaves if f"  {key}  (" not in shown]
    # a field without a literal of its own stands under a neighbour's (cpus_per_generator, cpus_per_trainer, ...)
    assert sum(bool(docs[key]) for key in leaves) >= 0.7 * len(leaves)


@pytest.mark.parametrize("verb", VERBS)
def test_dry_run_prints_yaml_that_composes_to_the_same_plan(verb, capsys):
    words = values_for_required(verb)
    assert cli.main([verb, *words, "--dry-run"]) == 0
    printed = OmegaConf.create(capsys.readouterr().out)
    assert printed == OmegaConf.create(schema.to_yaml(schema.compose(verb, words)))


@pytest.mark.parametrize("verb", VERBS)
def test_misspelt_key_exits_2_with_one_line(verb, capsys):
    assert cli.main([verb, "no_such.key=1"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"burnish {verb}: unknown key 'no_such.key'")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("verb", [name for name in VERBS if name not in ("audit", "parity", "reap")])
def test_required_keys_are_asked_for(verb, capsys):
    required = OmegaConf.missing_keys(schema.compose_tree(VERBS[verb], []))
    if not required:
        pytest.skip("every key of this verb has a default")
    assert cli.main([verb]) == 2
    assert f"{min(required)} is required" in capsys.readouterr().err


# ------------------------------------------------------------------ the command line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["evall"], "unknown verb 'evall'; did you mean 'eval'?"),
        (["distil"], "unknown verb 'distil'; did you mean 'distill'?"),
        (["eval", "--dryrun"], "unknown option '--dryrun'"),
        (["audit", "one", "two"], "'two' is not an override"),
        (["parity", "somewhere", "--cases"], "option --cases needs a value"),
        (["new", "tusk", "my-task"], "kind: expected task|verifier|harness, got 'tusk'"),
        (["new", "task", "one", "two"], "'two' is not an override"),
        (["new", "task"], "name is required"),
    ],
)
def test_command_line_mistake_exits_2(words, says, capsys):
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_positionals_and_options_become_overrides(capsys):
    assert cli.main(["parity", "some/dir,x", "--cases", "text*,quant", "--dry-run"]) == 0
    printed = OmegaConf.create(capsys.readouterr().out)
    assert (printed.dir, printed.cases) == ("some/dir,x", "text*,quant")
    assert cli.main(["audit", "runs/a=b", "--dry-run"]) == 2  # an override of a key that there is not
    assert cli.main(["audit", "runs/a", "--dry-run"]) == 0
    capsys.readouterr()
    assert cli.main(["new", "harness", "my name", "--dry-run"]) == 0
    printed = OmegaConf.create(capsys.readouterr().out)
    assert (printed.kind, printed.name) == ("harness", "my name")


def run_process(*words: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from burnish.configs.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)


def test_process_ends_with_code_and_sentence():
    done = run_process("eval", "taskz=x")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert "unknown key 'taskz'; did you mean 'tasks'?" in done.stderr
    assert run_process("--help").returncode == 0
    assert run_process().returncode == 2


def test_a_bug_keeps_its_traceback(monkeypatch):
    def broken(config):
        raise RuntimeError("a bug")

    monkeypatch.setattr(type(VERBS["reap"]), "entry_point", lambda self: broken)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["reap"])


@pytest.mark.parametrize("error", [UserError("line 3 of x.jsonl\nis broken"), FileNotFoundError("no such x.jsonl")])
def test_a_user_mistake_while_running_is_one_line(error, monkeypatch, capsys):
    def wrong(config):
        raise error

    monkeypatch.setattr(type(VERBS["reap"]), "entry_point", lambda self: wrong)
    assert cli.main(["reap"]) == 2
    assert capsys.readouterr().err == f"burnish reap: {' '.join(str(error).split())}\n"


def test_composing_any_verb_loads_no_torch():
    code = """
import sys
from burnish.configs import cli
assert "hydra" not in sys.modules, "the command line itself loads hydra"
from burnish.configs import schema
from burnish.configs.verbs import VERBS
for verb in VERBS.values():
    schema.compose_tree(verb, [])
    heavy = {"torch", "ray", "docker", "deepspeed", "wandb", "transformers"} & set(sys.modules)
    assert not heavy, f"{verb.name} loads {heavy}"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
