"""Where the weights of a version are found, and that nothing is used that is not what it should be."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from burnish.policy.checkpoint.lineage import policy_hash
from burnish.policy.checkpoint.released import load_policy, save_policy
from burnish.policy.training.distributed import shutdown
from burnish.rollout.replay.weights import NoWeights, weights_of
from burnish.rollout.train import trainer_settings
from burnish.rollout.trainer import Trainer


def same(found, model) -> bool:
    wanted = model.state_dict()
    return found.state.keys() == wanted.keys() and all(torch.equal(found.state[n], wanted[n]) for n in wanted)


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def test_the_start_policy_is_version_0_as_long_as_it_is_what_it_was(played, tmp_path):
    shutil.rmtree(played.folder / "weights")
    manifest = manifest_of(played.folder)
    found = weights_of(0, played.run, played.folder, manifest)
    assert found.where == played.run.policy
    assert same(found, load_policy(Path(played.run.policy)))
    other = replace(played.run, policy=str(shutil.copytree(played.run.policy, tmp_path / "other")))
    model = load_policy(tmp_path / "other")
    with torch.no_grad():
        model.head.weight += 1
    save_policy(model, tmp_path / "other", side_files_from=tmp_path / "other")
    with pytest.raises(NoWeights, match="has changed since the run was started"):
        weights_of(0, other, played.folder, manifest)
    with pytest.raises(NoWeights, match="is gone"):
        weights_of(0, replace(other, policy=str(tmp_path / "none")), played.folder, manifest)


def test_a_training_state_holds_the_weights_and_is_checked(played, tmp_path):
    shutil.rmtree(played.folder / "weights")
    run = replace(played.run, train=replace(played.run.train, zero_stage=1))
    trainer = Trainer(trainer_settings(run, played.folder))
    try:
        trainer.train_step.num_steps = 7
        with torch.no_grad():
            trainer.model.head.weight += 0.5
        folder = Path(trainer.save())
        found = weights_of(7, run, played.folder, manifest_of(played.folder))
        assert found.where == str(folder)
        assert same(found, trainer.model)
    finally:
        shutdown()
    path = next(folder.glob("deepspeed/*model_states.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(NoWeights, match="is damaged"):
        weights_of(7, run, played.folder, manifest_of(played.folder))


def test_the_policy_of_a_finished_run(played):
    model = load_policy(Path(played.run.policy))
    with torch.no_grad():
        model.head.weight += 0.25
    path = save_policy(model, played.folder / "policy", side_files_from=Path(played.run.policy))
    manifest = manifest_of(played.folder) | {"finished": True, "steps": 9, "policy": policy_hash(Path(path))}
    assert same(weights_of(9, played.run, played.folder, manifest), model)
    with pytest.raises(NoWeights, match="has changed since the run ended"):
        weights_of(9, played.run, played.folder, manifest | {"policy": "0" * 64})
    with pytest.raises(NoWeights, match="version 8 are not kept: a run keeps its start"):
        weights_of(8, played.run, played.folder, manifest)
