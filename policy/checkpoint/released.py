"""Released tensor names <-> the model's: read and write policy folders in the release's layout.

A policy folder holds config.json, model.safetensors (or shards with model.safetensors.index.json), tokenizer.json and
burnish.json (lineage). Our names equal the released ones except for the routed experts, which are stacked:
`layers.<i>.ffn.experts.<e>.w1.weight` is slice e of `layers.<i>.ffn.experts.w1`. Every tensor is accounted for by
name: a missing, unexpected, doubled or mis-shaped one is an error.
"""

import ctypes
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from burnish.policy.checkpoint.whole_files import sync
from burnish.policy.config import ModelConfig
from burnish.policy.model.transformer import Transformer
from burnish.policy.released_config import load_config, to_released

_STACK = re.compile(r"^(layers\.\d+\.ffn\.experts)\.(w[123])$")
# what an unquantised tensor may be stored as; it is copied into the model's own type
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
INDEX_FILE = "model.safetensors.index.json"
SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "burnish.json")
POLICY_FILES = {"config.json", INDEX_FILE, "tools_preamble.txt", *SIDE_FILES}


class CheckpointError(ValueError):
    """A checkpoint that does not hold this model: names the file and the tensor."""


def released_tensors(model: Transformer) -> Iterator[tuple[str, torch.Tensor]]:
    """(released name, tensor) of every parameter and buffer of `model`, stacks as views of their slices."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        match = _STACK.match(name)
        if match is None:
            yield name, tensor
        else:
            for expert, part in enumerate(tensor.unbind(0)):
                yield f"{match[1]}.{expert}.{match[2]}.weight", part


def read_tensors(directory: Path, only: Collection[str] | None = None) -> Iterator[tuple[Path, str, torch.Tensor]]:
    """Stream (file, released name, tensor) from a folder, one tensor in memory at a time.

    Files that the index does not name are left alone: a stale shard never overwrites a tensor.

    Args:
        only: released names to read; the others' bytes are not touched.

    Raises:
        CheckpointError: an index that is no index, names a tensor twice, a missing file or a tensor that its file lacks;
            an unreadable file.
    """
    index = directory / INDEX_FILE
    if index.is_file():
        wanted: dict[str, list[str]] = {}
        for name, file in _weight_map(index).items():
            wanted.setdefault(file, []).append(name)
        for file, names in wanted.items():
            if not (directory / file).is_file():
                raise CheckpointError(f"{index} puts tensor {names[0]} into {file}, but that file is missing")
    else:
        wanted = {"model.safetensors": []}
        if not (directory / "model.safetensors").is_file():
            raise CheckpointError(f"no model.safetensors and no model.safetensors.index.json in {directory}")
    for file, names in wanted.items():
        path = directory / file
        try:
            with safe_open(path, "pt") as archive:
                present = set(archive.keys())
                for name in names or sorted(present):
                    if name not in present:
                        raise CheckpointError(f"{path}: tensor {name} is in the index but not in this file")
                    if only is not None and name not in only:
                        continue
                    yield path, name, archive.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: not a whole safetensors file ({error})") from error


def _weight_map(index: Path) -> dict[str, str]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{index}: {twice} is named twice")
        return found

    try:
        content = json.loads(index.read_text("utf-8"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{index}: not JSON (line {error.lineno}: {error.msg})") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{index}: not UTF-8 (byte {error.start})") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: no weight_map from tensor names to file names")
    return weight_map


@torch.no_grad()
def load_weights(model: Transformer, directory: Path) -> None:
    """Copy a folder's tensors into `model`, each exactly once.

    Raises:
        CheckpointError: a missing, unexpected, doubled or mis-shaped tensor, one with block scales, or a value that is
            not finite.
    """
    targets = dict(released_tensors(model))
    filled: set[str] = set()
    for path, name, tensor in read_tensors(directory):
        if name.endswith(".scale") or tensor.dtype not in _DTYPES:
            what = "a block scale" if name.endswith(".scale") else f"stored as {tensor.dtype}"
            raise CheckpointError(
                f"{path}: tensor {name} is {what}; quantised checkpoints cannot be read yet, "
                f"convert the folder to bf16 first"
            )
        if name not in targets:
            raise CheckpointError(f"{path}: tensor {name} does not belong to this model")
        if name in filled:
            raise CheckpointError(f"{path}: tensor {name} was read already")
        target = targets[name]
        if tensor.shape != target.shape:
            raise CheckpointError(
                f"{path}: tensor {name} must be {list(target.shape)} for this config, got {list(tensor.shape)}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{path}: tensor {name} holds NaN or infinity; the file is damaged or its training diverged, take an "
                f"earlier one"
            )
        target.copy_(tensor)
        filled.add(name)
    missing = [name for name in targets if name not in filled]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{directory}: tensor {missing[0]} is missing{more}")


def load_policy(directory: Path | str, *, device: torch.device | str = "cpu") -> Transformer:
    """The model of a policy folder, weights in fp32 (CPU) or as the config says.

    Raises:
        FileNotFoundError: no such folder.
        ConfigError, CheckpointError: what is wrong and where.
    """
    directory = Path(directory)
    _restore(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"no policy folder at {directory}; make one with `burnish init`")
    model = Transformer(load_config(directory))
    load_weights(model, directory)
    return model.to(device)


def save_policy(model: Transformer, directory: Path | str, *, side_files_from: Path | str | None = None) -> Path:
    """Write a policy folder in one step: a kill leaves the old folder or the new one, never a mixture.

    Args:
        model: weights are written as they are kept.
        directory: replaced if it is there.
        side_files_from: folder whose tokenizer, generation config and burnish.json are copied along.

    Returns:
        The folder.

    Raises:
        CheckpointError: what is there is no policy folder.
    """
    directory = Path(directory)
    refuse_other_content(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    _restore(directory)
    staged = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    if staged.exists():
        shutil.rmtree(staged)
    staged.mkdir()
    try:
        _write(model, staged, side_files_from)
    except Exception:  # a full disk: what is half-written would keep it full
        shutil.rmtree(staged, ignore_errors=True)
        raise
    if not directory.exists():
        staged.rename(directory)
    elif _exchange(staged, directory):
        shutil.rmtree(staged)
    else:
        retired = directory.with_name(f".{directory.name}.{os.getpid()}.old")
        directory.rename(retired)
        staged.rename(directory)
        shutil.rmtree(retired)
    sync(directory.parent)
    return directory


def refuse_other_content(directory: Path) -> None:
    """Replacing a folder removes all that is in it, so only a policy's own files may be there.

    Raises:
        CheckpointError: `directory` is a file, or holds something else than a policy.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; give the path of a policy folder")
    for path in sorted(directory.iterdir()):
        if path.name not in POLICY_FILES and not path.name.endswith(".safetensors"):
            raise CheckpointError(
                f"{directory} holds {path.name}, which is no file of a policy and would be lost; give another folder or "
                f"remove it"
            )


def _write(model: Transformer, staged: Path, side_files_from: Path | str | None) -> None:
    """Every file of a policy folder, down to the disk."""
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in released_tensors(model)}
    save_file(tensors, staged / "model.safetensors", metadata={"format": "pt"})
    (staged / "config.json").write_text(json.dumps(released_config(model.config), indent=1) + "\n")
    if side_files_from is not None:
        for name in SIDE_FILES:
            if (Path(side_files_from) / name).is_file():
                shutil.copy2(Path(side_files_from) / name, staged / name)
    for path in staged.iterdir():
        sync(path)
    sync(staged)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where system or file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def _restore(directory: Path) -> None:
    """Bring the old folder back where a save without exchange was killed between its two renames."""
    if directory.exists():
        return
    for retired in directory.parent.glob(f".{directory.name}.*.old"):
        retired.rename(directory)
        return


def released_config(config: ModelConfig) -> dict:
    """config.json's content for weights that are written unquantised, in fp32."""
    raw = to_released(config)
    raw["dtype"] = "float32"
    return raw
