"""`burnish parity DIR`: run folders of golden vectors through the code paths that serving and training use.

Each case folder holds config.json, model.safetensors (or uses the model of the folder before its first underscore) and
expected.safetensors with inputs, expected outputs and, in its metadata, `bound` (error ratio) and `bound_abs`.
Ids and quantised values must match exactly.
"""

import fnmatch
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from burnish.kernels.quant import reference as quant
from burnish.policy.checkpoint.released import load_policy, released_tensors
from burnish.policy.config import ParityRun
from burnish.policy.model.graph_store import GraphStore
from burnish.policy.model.rows import Rows, build_rows
from burnish.policy.model.transformer import Output, Transformer


@dataclass(frozen=True, kw_only=True)
class Line:
    """One compared tensor."""

    case: str
    name: str
    max_abs: float
    ratio: float
    bound: str
    ok: bool


@dataclass(frozen=True, kw_only=True)
class Case:
    """One folder's expectations."""

    name: str
    directory: Path
    expected: dict[str, torch.Tensor]
    bound: float
    bound_abs: float

    def close(self, name: str, got: torch.Tensor, want: torch.Tensor) -> Line:
        """Compare floats: RMS of the difference over RMS of the expectation, and the largest difference."""
        if got.shape != want.shape:
            return self._line(name, float("inf"), float("inf"), f"shape {list(want.shape)}", False)
        got, want = got.double(), want.double()
        worst = (got - want).abs().max().item() if got.numel() else 0.0
        scale = want.square().mean().sqrt().clamp_min(1e-12) if got.numel() else torch.tensor(1.0)
        ratio = ((got - want).square().mean().sqrt() / scale).item() if got.numel() else 0.0
        ok = ratio <= self.bound and worst <= self.bound_abs  # NaN compares false
        return self._line(name, worst, ratio, f"{self.bound:.1e}/{self.bound_abs:.1e}", ok)

    def exact(self, name: str, got: torch.Tensor, want: torch.Tensor) -> Line:
        """Compare ids or bits."""
        if got.shape != want.shape:
            return self._line(name, float("inf"), float("inf"), f"shape {list(want.shape)}", False)
        worst = (got.double() - want.double()).abs()
        worst = torch.where(got == want, 0.0, worst).max().item() if got.numel() else 0.0
        if got.is_floating_point():
            size = torch.int16 if got.element_size() == 2 else torch.int32
            same = got.dtype == want.dtype and torch.equal(got.contiguous().view(size), want.contiguous().view(size))
        else:
            same = torch.equal(got.long(), want.long())
        return self._line(name, worst, 0.0 if same else float("inf"), "exact", same)

    def _line(self, name: str, max_abs: float, ratio: float, bound: str, ok: bool) -> Line:
        return Line(case=self.name, name=name, max_abs=max_abs, ratio=ratio, bound=bound, ok=ok)


def load_case(directory: Path) -> Case:
    """Read a case folder.

    Raises:
        ValueError: no expected.safetensors, or no bounds in its metadata.
    """
    path = directory / "expected.safetensors"
    if not path.is_file():
        raise ValueError(f"{directory}: no expected.safetensors")
    with safe_open(path, "pt") as archive:
        metadata = archive.metadata() or {}
        expected = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
    if "bound" not in metadata or "bound_abs" not in metadata:
        raise ValueError(f"{path}: metadata must hold bound and bound_abs, got {sorted(metadata)}")
    return Case(
        name=directory.name,
        directory=directory,
        expected=expected,
        bound=_bound(metadata["bound"], f"{path}: bound"),
        bound_abs=_bound(metadata["bound_abs"], f"{path}: bound_abs"),
    )


def _bound(text: str, name: str) -> float:
    """A number that can be exceeded: with an infinite bound everything would pass."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, got {text!r}")
    return value


def _model_of(case: Case) -> Transformer:
    directory = case.directory
    if not (directory / "model.safetensors").is_file():
        directory = directory.with_name(directory.name.partition("_")[0])
    return load_policy(directory)


def _layout(expected: dict[str, torch.Tensor]) -> tuple[Rows, torch.Tensor]:
    """Rows of a [B, S] batch (documents of packed rows become contexts) and the live mask [B, S]."""
    ids = expected["input_ids"]
    live = torch.ones_like(ids, dtype=torch.bool)
    if "attention_mask" in expected:
        live = expected["attention_mask"].bool()
    documents = expected.get("sequence_ids", live.long())
    live = live & (documents > 0)
    positions = expected.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))
    document = torch.arange(ids.shape[0]).unsqueeze(1) * (int(documents.max()) + 1) + documents
    _, context = document[live].unique(return_inverse=True)
    return build_rows(ids[live].tolist(), positions[live].tolist(), context.tolist()), live


def run_text(case: Case) -> Iterator[Line]:
    """Logits, streams before each block, selections, routes and, where given, loss and gradients."""
    expected, model = case.expected, _model_of(case)
    rows, live = _layout(expected)
    count = int(live.sum())
    with torch.set_grad_enabled("loss" in expected):
        out = model(rows, GraphStore(model.config, rows), capture=True)
        logits = model.logits(out.hidden)
    if "loss" in expected:
        yield from _gradients(case, model, rows, logits, live)
        return

    def shaped(value: torch.Tensor) -> torch.Tensor:
        return value[:count].detach()

    yield case.close("logits", shaped(logits), expected["logits"][live])
    if "streams" in expected:
        depth = model.config.num_hidden_layers
        if len(expected["streams"]) != depth:
            raise ValueError(f"streams has {len(expected['streams'])} layers, the model has {depth}")
        for layer, want in enumerate(expected["streams"]):
            yield case.close(f"streams.{layer}", shaped(out.captures[f"streams.{layer}"]), want[live])
    for name, want in sorted(expected.items()):
        kind, _, layer = name.partition(".")
        if kind in ("topk_indices", "candidates", "routes"):
            got = _published(kind, int(layer), model, rows, out)[:count]
            yield _same_ids(case, name, got, want[live])


def _published(kind: str, layer: int, model: Transformer, rows: Rows, out: Output) -> torch.Tensor:
    if kind == "topk_indices":
        return out.captures[f"topk_indices.{layer}"]
    if kind == "routes":
        return out.experts[layer].sort(-1).values
    config = model.config
    visible = torch.where(rows.live, (rows.position + 1) // config.compress_ratios[layer], 0)
    entry = torch.arange(int(visible.max()) or 1)
    seen = entry < visible.unsqueeze(1)
    pool = out.captures.get(f"candidate_blocks.{layer}")
    if pool is not None:
        seen = seen & pool.repeat_interleave(config.candidate_block_size, 1)[:, : entry.numel()]
    return seen


def _same_ids(case: Case, name: str, got: torch.Tensor, want: torch.Tensor) -> Line:
    """Exact up to how many empty slots an implementation publishes."""
    width = max(got.shape[-1], want.shape[-1])
    fill = 0 if got.dtype == torch.bool else -1

    def widened(ids: torch.Tensor) -> torch.Tensor:
        return F.pad(ids.long(), (0, width - ids.shape[-1]), value=fill)

    return case.exact(name, widened(got), widened(want))


def _gradients(case: Case, model: Transformer, rows: Rows, logits: torch.Tensor, live: torch.Tensor) -> Iterator[Line]:
    """Mean next-token cross-entropy over all rows and its gradient by released name."""
    count = int(live.sum())
    context, token = rows.context[:count], rows.token_id[:count]
    predicts = context[1:] == context[:-1]
    loss = F.cross_entropy(logits[: count - 1][predicts], token[1:][predicts])
    loss.backward()
    yield case.close("loss", loss.detach().reshape(()), case.expected["loss"].reshape(()))
    stacked = {name: parameter.grad for name, parameter in model.named_parameters()}
    got: dict[str, torch.Tensor | None] = {}
    for name, part in released_tensors(model):
        head, _, rest = name.partition(".ffn.experts.")
        if rest:
            expert, which, _ = rest.split(".")
            grad = stacked[f"{head}.ffn.experts.{which}"]
            got[name] = None if grad is None else grad[int(expert)]
        elif isinstance(part, torch.nn.Parameter):
            got[name] = stacked[name]
    for name, grad in got.items():
        if grad is not None and f"grad.{name}" not in case.expected:
            raise KeyError(f"grad.{name}")
    known = dict(released_tensors(model))
    for name, want in sorted(case.expected.items()):
        if name.startswith("grad."):
            grad = got.get(name.removeprefix("grad."))
            if name.removeprefix("grad.") not in known:
                raise ValueError(f"{name} names no tensor of this model")
            yield case.close(name, torch.zeros_like(want) if grad is None else grad, want)


def run_quant(case: Case) -> Iterator[Line]:
    """The fake quantisers, and decode(encode(x)), bit for bit."""
    forms = {
        "fp8": (quant.fake_fp8, quant.encode_fp8, quant.decode_fp8),
        "mxfp4": (quant.fake_mxfp4, quant.encode_mxfp4, quant.decode_mxfp4),
        "nvfp4": (quant.fake_nvfp4, quant.encode_nvfp4, quant.decode_nvfp4),
    }
    x = case.expected["x"]
    for name, (fake, encode, decode) in forms.items():
        yield case.exact(name, fake(x), case.expected[name])
        yield case.exact(f"{name}_stored", decode(encode(x), x.shape[-1]), case.expected[name])
        yield case.exact(f"{name}_bf16", fake(x.bfloat16()), case.expected[f"{name}_bf16"])


RUNNERS: dict[str, Callable[[Case], Iterator[Line]]] = {"text": run_text, "quant": run_quant}
"""By the case's name up to its first underscore."""


def run(directory: Path, patterns: str, write: Callable[[str], object]) -> int:
    """Run the cases of `directory` whose names match one of the comma-separated `patterns`.

    Returns:
        0 when every line is ok, 1 when one fails, 2 when a case cannot be run.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"no folder of golden cases at {directory}")
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    names = sorted(path.name for path in directory.iterdir() if path.is_dir())
    cases = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in wanted)]
    if not cases:
        raise ValueError(f"no case in {directory} matches {patterns!r}; there are {', '.join(names) or 'none'}")
    status = 0
    for name in cases:
        runner = RUNNERS.get(name.partition("_")[0])
        try:
            if runner is None:
                raise ValueError(f"no code path for cases of kind {name.partition('_')[0]!r}")
            lines = list(runner(load_case(directory / name)))
        # torch answers tensors that do not fit together with RuntimeError or TypeError
        except (ValueError, LookupError, OSError, SafetensorError, RuntimeError, TypeError) as error:
            what = f"no tensor {error}" if isinstance(error, KeyError) else str(error)
            write(f"{name:<14} cannot be run: {what}")
            status = 2
            continue
        for line in lines:
            verdict = "ok" if line.ok else "FAIL"
            numbers = f"max {line.max_abs:.2e}  ratio {line.ratio:.2e}  bound {line.bound}"
            write(f"{line.case:<14} {line.name:<44} {numbers}  {verdict}")
        if status == 0 and not all(line.ok for line in lines):
            status = 1
    return status


def main(config: ParityRun) -> int:
    """Entry point of `burnish parity`."""
    return run(Path(config.dir), config.cases, lambda line: sys.stdout.write(line + "\n"))
