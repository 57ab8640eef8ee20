"""The weights of a policy version of a run, from wherever they are still kept, and whether a version is still what it was.

A run keeps its start policy, the last versions that were published, the last training states and, at its end, the policy.
Whatever is taken from there is checked first: hashes of the lineage, checksums of tensors, digests of files.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from burnish.policy.checkpoint.lineage import policy_hash
from burnish.policy.checkpoint.released import load_policy
from burnish.policy.training.resume import CheckpointStore
from burnish.rollout.config import RlRun
from burnish.rollout.ledger_view import LedgerView
from burnish.rollout.weight_sync import MANIFEST, WeightManifest, WeightSyncError, receive

State = Mapping[str, torch.Tensor]
MODEL_STATES = "deepspeed/mp_rank_00_model_states.pt"
"""Where a training state holds the whole model, in every ZeRO stage that is offered."""


class NoWeights(ValueError):
    """The weights of a version cannot be had; says why."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Tensors of one version."""

    version: int
    where: str
    """Path they were read from."""
    state: State


def weights_of(version: int, run: RlRun, run_dir: Path, manifest: Mapping[str, Any]) -> Weights:
    """The tensors that version `version` of this lineage had.

    Raises:
        NoWeights: nothing holds them any more, or what does is damaged.
    """
    reasons: list[str] = []
    sources: list[Callable[[int, RlRun, Path, Mapping[str, Any]], Weights | None]] = [
        _published,
        _start_policy,
        _training_state,
        _final_policy,
    ]
    for source in sources:
        try:
            found = source(version, run, run_dir, manifest)
        except (ValueError, OSError, LookupError, TypeError, WeightSyncError, RuntimeError) as error:
            reasons.append(" ".join(str(error).split()))
            continue
        if found is not None:
            return found
    kept = f"a run keeps its start, the last versions it published and {run.train.keep_checkpoints} training states"
    raise NoWeights(f"the weights of version {version} are not kept: {'; '.join(reasons) or kept}")


def _published(version: int, run: RlRun, run_dir: Path, manifest: Mapping[str, Any]) -> Weights | None:
    folder = run_dir / "weights" / f"v{version:06d}"
    if not (folder / MANIFEST).is_file():
        return None
    stored = WeightManifest(**json.loads((folder / MANIFEST).read_text("utf-8")))
    # the folder may have been moved since
    state = receive(replace(stored, folder=str(folder)))
    return Weights(version=version, where=str(folder), state=state)


def _start_policy(version: int, run: RlRun, run_dir: Path, manifest: Mapping[str, Any]) -> Weights | None:
    if version != 0:
        return None
    folder = Path(run.policy)
    if not folder.is_dir():
        raise NoWeights(f"the start policy {folder} is gone")
    if policy_hash(folder) != manifest["parents"].get("policy"):
        raise NoWeights(f"the start policy {folder} has changed since the run was started")
    return Weights(version=0, where=str(folder), state=load_policy(folder).state_dict())


def _training_state(version: int, run: RlRun, run_dir: Path, manifest: Mapping[str, Any]) -> Weights | None:
    folder = run_dir / "checkpoints" / f"step-{version}"
    if not folder.is_dir():
        return None
    CheckpointStore(folder.parent, keep=1).verify(folder, num_steps=version)
    # written by this run, its digest just checked: no stranger's pickle
    content = torch.load(folder / MODEL_STATES, map_location="cpu", weights_only=False)
    prefix = "model."
    state = {name.removeprefix(prefix): value for name, value in content["module"].items() if name.startswith(prefix)}
    return Weights(version=version, where=str(folder), state=state)


def _final_policy(version: int, run: RlRun, run_dir: Path, manifest: Mapping[str, Any]) -> Weights | None:
    folder = run_dir / "policy"
    if manifest.get("steps") != version or not folder.is_dir():
        return None
    if policy_hash(folder) != manifest.get("policy"):
        raise NoWeights(f"{folder} has changed since the run ended")
    return Weights(version=version, where=str(folder), state=load_policy(folder).state_dict())


def last_shared_version(ledger: LedgerView, attempt_id: str) -> int | None:
    """Newest version that still means the same weights as when the attempt was played; None where all of them do.

    When a run goes on from checkpoint k, later versions are made again: their numbers then name other weights.
    """
    rows = ledger.rows(
        "SELECT min(step) AS step FROM events WHERE kind = 'checkpoint_loaded' AND seq > coalesce("
        "(SELECT max(seq) FROM events WHERE kind = 'attempt_opened' AND attempt_id = ?), 0)",
        attempt_id,
    )
    return rows[0]["step"]
