"""Where a policy comes from: hashes of its files and of its parents, kept in burnish.json of every policy folder."""

import hashlib
import importlib.metadata
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from burnish.policy.checkpoint.json_file import read_object

LINEAGE_FILE = "burnish.json"


def file_hash(path: Path) -> str:
    """sha256 of a file's content, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def policy_hash(directory: Path) -> str:
    """sha256 over names and contents of what decides a policy's behaviour: config, weights, tokenizer."""
    digest = hashlib.sha256()
    for path in sorted([*directory.glob("*.safetensors"), directory / "config.json", directory / "tokenizer.json"]):
        if path.is_file():
            digest.update(f"{path.name} {file_hash(path)}\n".encode())
    return digest.hexdigest()


def code_version() -> str:
    """Package version, with the commit where the package is a checkout."""
    version = importlib.metadata.version("burnish")
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return version
    found = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return f"{version}+{found.stdout.strip()[:12]}" if found.returncode == 0 else version


def child_side_files(parent: Path, into: Path, *, stage: str, parents: dict[str, str], **facts: Any) -> Path:
    """Side files of a policy trained from `parent`, with its lineage: hand the folder to `save_policy`.

    Args:
        parent: policy folder the training started from.
        into: folder to make; replaced if it is there.
        stage: what trained it.
        parents: name -> hash of everything that went in.
        facts: further JSON values.
    """
    if into.exists():
        shutil.rmtree(into)
    into.mkdir(parents=True)
    for path in parent.glob("*.json"):
        if path.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy2(path, into / path.name)
    before = read_object(parent / LINEAGE_FILE) if (parent / LINEAGE_FILE).is_file() else {}
    lineage = {key: value for key, value in before.items() if key == "preset"}
    lineage |= {"stage": stage, "parents": parents, "code": code_version(), **facts}
    (into / LINEAGE_FILE).write_text(json.dumps(lineage, indent=1) + "\n")
    return into
