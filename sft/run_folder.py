"""The folder of a training run: which run it belongs to, whether that is finished, and the policy that came out of it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from burnish.policy.checkpoint.folder_lock import held
from burnish.policy.checkpoint.json_file import read_object
from burnish.policy.checkpoint.lineage import child_side_files, code_version, policy_hash
from burnish.policy.checkpoint.released import save_policy
from burnish.policy.checkpoint.whole_files import write_json, write_text
from burnish.policy.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """One run's folder. Life cycle: `is_finished`, else inside `claimed()` train and `publish`."""

    path: Path
    stage: str
    """What trains, such as `sft`."""
    config: str
    """The whole configuration as YAML: config.yaml of the folder."""
    parents: dict[str, str]
    """Name -> hash of everything that goes in."""

    @property
    def policy(self) -> Path:
        """Where the trained policy lies once the run is finished."""
        return self.path / "policy"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """`claim`, and keep other processes out; of several ranks the first holds the folder for all.

        Raises:
            ValueError: the folder holds another run, or another process is writing it.
        """
        with held(self.path) if dist.get_rank() == 0 else nullcontext():
            self.claim()
            yield

    def claim(self) -> None:
        """Start the folder, or make sure that it is this very run's.

        Raises:
            ValueError: the folder holds another run.
        """
        path = self.path / "config.yaml"
        if path.is_file():
            before = self._manifest()["parents"]
            if path.read_bytes() != self.config.encode() or before != self.parents:
                changed = [name for name in self.parents if before.get(name) != self.parents[name]] or ["config.yaml"]
                raise ValueError(
                    f"{self.path} holds another run ({', '.join(changed)} differs); give this {self.stage} run "
                    f"another folder or remove that one"
                )
        elif dist.get_rank() == 0:
            self.path.mkdir(parents=True, exist_ok=True)
            manifest = {"stage": self.stage, "parents": self.parents, "code": code_version(), "finished": False}
            write_json(self.path / "manifest.json", manifest)
            write_text(path, self.config)

    def is_finished(self) -> bool:
        """True when there is nothing left to do. Raises ValueError as `claim` does."""
        if not (self.path / "config.yaml").is_file():
            return False
        self.claim()
        # a policy that somebody took away is written again, from the last training state
        return bool(self._manifest()["finished"]) and self.policy.is_dir()

    def _manifest(self) -> dict[str, Any]:
        advice = f"remove {self.path} and give the same command again"
        return read_object(self.path / "manifest.json", "parents", "finished", advice=advice)

    def publish(self, parent: Path, model: Transformer, facts: dict[str, Any]) -> None:
        """Write the trained policy with its lineage, then mark the run finished. Only the first rank calls it.

        Args:
            parent: policy folder the training started from.
            facts: JSON values about the run, for burnish.json and the manifest.
        """
        side = child_side_files(parent, self.path / ".side-files", stage=self.stage, parents=self.parents, **facts)
        save_policy(model, self.policy, side_files_from=side)
        for path in side.iterdir():
            path.unlink()
        side.rmdir()
        manifest = self._manifest()
        manifest |= {"finished": True, "policy": policy_hash(self.policy), **facts}
        write_json(self.path / "manifest.json", manifest)
