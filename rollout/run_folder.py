"""The folder of a run that acts and learns: what it was started with, and whether that is still so.

`config.yaml` holds the settings, `manifest.json` the lineage: hashes of everything that goes in, and what came out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from burnish.envs.errors import UserError
from burnish.policy.checkpoint.json_file import read_object
from burnish.policy.checkpoint.lineage import code_version
from burnish.policy.checkpoint.whole_files import write_json, write_text
from burnish.rollout.config import ActingRun

CONFIG, MANIFEST, LEDGER = "config.yaml", "manifest.json", "ledger.sqlite"
Run = TypeVar("Run", bound=ActingRun)


@dataclass(frozen=True, kw_only=True)
class Parent:
    """Something that goes into a run."""

    hash: str
    path: str
    """Where it was found, for messages."""


def read_run(run: Run, verb: str) -> Run:
    """The settings of the run that is gone on with.

    Raises:
        UserError: there is none, or other settings were given beside resume.
    """
    path = Path(run.resume) / CONFIG
    if not path.is_file():
        raise UserError(f"resume={run.resume}: no run of `burnish {verb}` there ({path} is missing)")
    if replace(run, resume="") != type(run)():
        raise UserError(f"resume={run.resume} takes its settings from {path}: give no other key")
    try:
        stored = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(type(run)), OmegaConf.load(path)))
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError, OSError) as error:
        raise UserError(f"{path}: not settings of `burnish {verb}` that this version reads ({error})") from error
    assert isinstance(stored, type(run))
    # the folder may have been moved or be named from another place
    folder = Path(run.resume).resolve()
    return replace(stored, runs=str(folder.parent), name=folder.name)


def claim(
    run_dir: Path, *, stage: str, parents: Mapping[str, Parent], settings: str, is_resumed: bool
) -> dict[str, Any]:
    """Starts the run folder, or makes sure that it is what is gone on with; returns its manifest.

    Args:
        stage: the verb.
        parents: name -> everything that goes in.
        settings: the run's, as YAML.

    Raises:
        UserError: the folder is taken, or a parent is no longer what the run started from.
    """
    path = run_dir / MANIFEST
    hashes = {name: parent.hash for name, parent in parents.items()}
    if is_resumed:
        manifest = read_object(path, "parents", "finished", advice="take the run's folder from a copy, or start again")
        for name, parent in parents.items():
            if manifest["parents"].get(name) != parent.hash:
                raise UserError(f"{parent.path} has changed since {run_dir} was started: {name} has another hash")
        return manifest
    if (run_dir / CONFIG).exists():
        raise UserError(
            f"{run_dir} holds a run: go on with `burnish {stage} resume={run_dir}`, or choose another name="
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    manifest = {"stage": stage, "parents": hashes, "code": code_version(), "finished": False}
    write_json(path, manifest)
    write_text(run_dir / CONFIG, settings)
    return manifest
