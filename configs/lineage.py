"""The lineage of a pipeline in one file: what every finished stage was made of, by content, and what it made.

`manifest.json` of the run folder. A stage's parents are the outputs of earlier stages, so a policy can be traced to the
tasks and weights it comes from (each policy folder says the same of itself in burnish.json).
"""

from pathlib import Path
from typing import Any

from burnish.configs.stages import Stage, read_marker
from burnish.envs.taskset import load_taskset
from burnish.policy.checkpoint.lineage import code_version, file_hash, policy_hash
from burnish.policy.checkpoint.whole_files import write_json


class Lineage:
    """The manifest of one run folder.

    Args:
        path: of manifest.json.
        markers: folder of the stages' markers.
    """

    def __init__(self, path: Path, markers: Path) -> None:
        self.path, self._markers = path, markers
        self._hashes: dict[tuple[Path, int], str] = {}
        self._made: dict[str, Any] = {}

    def add(self, stage: Stage) -> None:
        """A stage is done: write the manifest with it."""
        self._made[stage.name] = {
            "verb": stage.verb,
            "settings": read_marker(self._markers / f"{stage.name}.json")["fingerprint"],
            "parents": {str(path): self._hash(path) for path in stage.inputs},
            "output": {str(stage.done): self._hash(stage.done)},
        }
        write_json(self.path, {"code": code_version(), "stages": self._made})

    def _hash(self, path: Path) -> str:
        key = (path, path.stat().st_mtime_ns)
        if key not in self._hashes:
            self._hashes[key] = hash_of(path)
        return self._hashes[key]


def hash_of(path: Path) -> str:
    """Content hash of what a stage leaves: a task set's and a policy's own, or the file's."""
    if path.name == "taskset.json":
        return load_taskset(path.parent).content_hash
    return policy_hash(path.parent) if path.name == "model.safetensors" else file_hash(path)
