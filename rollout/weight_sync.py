"""Publishing a policy version: staged safetensors with a checksum of every tensor, and its receipt by an engine.

The trainer stages version v (parameters and buffers) and publishes it with one rename; a generator loads it, compares
every checksum, swaps between two engine steps and answers with a receipt. A receipt that names another version, or whose
engine holds other bytes than were published, fences that generator: nothing it samples would be what the trainer thinks.

Transport is the filesystem; a manifest is all that crosses between processes.
"""

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from burnish.rollout.types import RolloutError

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
TENSORS = "weights.safetensors"


class WeightSyncError(RolloutError):
    """Weights that did not arrive as they were published. Names the version, the place and the tensor."""


@dataclass(frozen=True, kw_only=True)
class WeightManifest:
    """What was published: the checksum of every tensor by name, and of all of them together."""

    version: int
    folder: str
    checksums: dict[str, str]
    digest: str
    size_bytes: int
    seconds: float
    """Spent on copying, hashing and writing."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """A generator's word on the weights it now answers with."""

    generator: str
    version: int
    digest: str
    """Over the tensors that the engine holds, computed from the engine after the swap."""
    seconds: float


def tensor_checksum(tensor: "torch.Tensor") -> str:
    """Hash of dtype, shape and bytes."""
    import torch

    data = tensor.detach().contiguous().cpu()
    head = f"{data.dtype}{tuple(data.shape)}".encode()
    raw = data.reshape(-1).view(torch.uint8).numpy().data if data.numel() else b""
    return hashlib.blake2b(raw, key=hashlib.blake2b(head, digest_size=32).digest(), digest_size=16).hexdigest()


def checksums(tensors: Iterable[tuple[str, "torch.Tensor"]]) -> dict[str, str]:
    """Checksum by tensor name."""
    return {name: tensor_checksum(tensor) for name, tensor in tensors}


def digest_of(sums: Mapping[str, str]) -> str:
    """One hash over all checksums, by name."""
    return hashlib.sha256(json.dumps(dict(sorted(sums.items()))).encode()).hexdigest()


def publish(state: Mapping[str, "torch.Tensor"], version: int, root: Path, keep: int = 2) -> WeightManifest:
    """Stages and publishes one version; readers see it complete or not at all.

    Args:
        state: every tensor of the model, buffers included (`model.state_dict()`).
        root: folder of all versions, nothing else; this one and the `keep - 1` before it are left.
    """
    from safetensors.torch import save_file

    started = time.monotonic()
    root.mkdir(parents=True, exist_ok=True)
    # safetensors refuses tensors that share storage (tied weights); a copy each is what the reader gets anyway
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
    sums = checksums(tensors.items())
    staging = Path(tempfile.mkdtemp(prefix=f".staging-{version}-", dir=root))
    save_file(tensors, staging / TENSORS)
    final = root / f"v{version:06d}"
    manifest = WeightManifest(
        version=version,
        folder=str(final),
        checksums=sums,
        digest=digest_of(sums),
        size_bytes=(staging / TENSORS).stat().st_size,
        seconds=time.monotonic() - started,
    )
    (staging / MANIFEST).write_text(json.dumps(asdict(manifest)))
    if final.exists():
        # a version published by the driver's dead predecessor: its lineage ended with it
        shutil.rmtree(final)
    staging.replace(final)
    # what is neither new nor the one before is old, or of a dead lineage, or was never finished
    kept = {f"v{v:06d}" for v in range(version - keep + 1, version + 1)}
    for folder in root.iterdir():
        if folder.name not in kept and folder.is_dir():
            shutil.rmtree(folder)
    return manifest


def receive(manifest: WeightManifest) -> dict[str, "torch.Tensor"]:
    """The published tensors, every one compared with its checksum.

    Raises:
        WeightSyncError: missing file, missing or extra tensor, or other bytes than were published.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(manifest.folder) / TENSORS
    where = f"policy version {manifest.version} at {path}"
    try:
        state = load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise WeightSyncError(f"{where}: cannot be read ({error})") from error
    verify(state.items(), manifest, where)
    return state


def verify(tensors: Iterable[tuple[str, "torch.Tensor"]], manifest: WeightManifest, where: str) -> str:
    """Compares tensors with a manifest; returns their digest.

    Raises:
        WeightSyncError: naming the first tensor that is missing, extra or different.
    """
    sums = checksums(tensors)
    for name in sorted(sums.keys() | manifest.checksums.keys()):
        if sums.get(name) != manifest.checksums.get(name):
            what = "is missing" if name not in sums else "is not in it" if name not in manifest.checksums else "differs"
            got, published = sums.get(name), manifest.checksums.get(name)
            raise WeightSyncError(f"{where}: tensor {name!r} {what} (checksum {got}, published {published})")
    return digest_of(sums)


def check_receipt(receipt: Receipt, manifest: WeightManifest) -> None:
    """Fences a generator that does not hold what was published.

    Raises:
        WeightSyncError: another version, or other bytes.
    """
    if receipt.version != manifest.version:
        raise WeightSyncError(
            f"generator {receipt.generator} acknowledges policy version {receipt.version}, published is {manifest.version}"
        )
    if receipt.digest != manifest.digest:
        raise WeightSyncError(
            f"generator {receipt.generator} holds other weights than policy version {manifest.version} "
            f"(digest {receipt.digest[:12]}, published {manifest.digest[:12]})"
        )
