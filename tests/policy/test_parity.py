"""`burnish parity` on the golden vectors: passes as they are, notices one moved value, names what is missing."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from burnish.configs.cli import main
from burnish.policy.checkpoint.released import save_policy
from burnish.policy.model.graph_store import GraphStore
from burnish.policy.model.rows import plain_rows
from burnish.policy.parity import run

GOLDEN = Path(__file__).parents[1] / "golden"


def lines_of(directory, patterns):
    lines = []
    return run(Path(directory), patterns, lines.append), lines


def edit(path, change):
    """Rewrite a safetensors file through `change(tensors)`, metadata kept."""
    with safe_open(path, "pt") as archive:
        metadata = archive.metadata()
        tensors = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
    return metadata


@pytest.fixture
def copy(tmp_path):
    """Copies golden folders to where they may be damaged."""

    def make(*names):
        for name in names:
            shutil.copytree(GOLDEN / name, tmp_path / "golden" / name)
        return tmp_path / "golden"

    return make


def test_every_golden_case_holds(capsys):
    assert main(["parity", str(GOLDEN), "--cases", "text*,quant"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {
        "quant", "text", "text_grads", "text_long", "text_one", "text_packed", "text_padded", "text_short"
    }  # fmt: skip
    assert all(line.endswith("  ok") for line in lines)
    compared = {line.split()[1] for line in lines if line.startswith("text ")}
    assert {"logits", "streams.0", "streams.7", "topk_indices.6", "candidates.4", "routes.7"} <= compared
    grads = [line.split()[1] for line in lines if line.startswith("text_grads ")]
    with safe_open(GOLDEN / "text_grads" / "expected.safetensors", "pt") as archive:
        assert sorted(grads) == sorted(set(archive.keys()) - {"input_ids"})


def move(name, at, by):
    def change(tensors):
        tensors[name][at] += by

    return change


def other_id(name, at):
    def change(tensors):
        tensors[name][at] = 1 - tensors[name][at].int()

    return change


@pytest.mark.parametrize(
    ("case", "name", "at"),
    [
        ("text", "logits", (1, 52, 3)),
        ("text", "streams", (5, 0, 17, 2, 9)),
        ("text_short", "logits", (0, 0, 0)),
        ("text_padded", "logits", (2, 0, 114)),
        ("text_packed", "logits", (0, 41, 7)),
    ],
)
def test_one_value_moved_by_ten_bounds_is_noticed(copy, case, name, at):
    directory = copy("text", *({case} - {"text"}))
    with safe_open(GOLDEN / case / "expected.safetensors", "pt") as archive:
        bound = float(archive.metadata()["bound_abs"])
    edit(directory / case / "expected.safetensors", move(name, at, 10 * bound))
    status, lines = lines_of(directory, case)
    assert status == 1
    failed = [line.split()[1] for line in lines if line.endswith("FAIL")]
    assert failed == [name if name == "logits" else f"streams.{at[0]}"]


@pytest.mark.parametrize(
    ("case", "name", "at"),
    [
        ("text", "topk_indices.6", (0, 52, 5)),
        ("text", "candidates.4", (1, 40, 11)),
        ("text_long", "routes.3", (1, 95, 0)),
    ],
)
def test_one_other_id_is_noticed(copy, case, name, at):
    directory = copy("text", *({case} - {"text"}))
    edit(directory / case / "expected.safetensors", other_id(name, at))
    status, lines = lines_of(directory, case)
    assert status == 1
    assert [line.split()[1] for line in lines if line.endswith("FAIL")] == [name]


def test_one_gradient_moved_by_ten_bounds_is_noticed(copy):
    directory = copy("text", "text_grads")
    name = "grad.layers.1.attn.compressor.wgate.weight"
    edit(directory / "text_grads" / "expected.safetensors", move(name, (3, 3), 1e-2))
    status, lines = lines_of(directory, "text_grads")
    assert status == 1
    assert [line.split()[1] for line in lines if line.endswith("FAIL")] == [name]


@pytest.mark.parametrize("form", ["fp8", "mxfp4", "nvfp4", "fp8_bf16", "mxfp4_bf16", "nvfp4_bf16"])
def test_one_other_code_of_a_quantiser_is_noticed(copy, form):
    directory = copy("quant")

    def change(tensors):
        value = tensors[form].view(torch.int16 if form.endswith("bf16") else torch.int32)
        place = torch.nonzero(tensors[form] == 0)[0]
        value[tuple(place)] ^= torch.iinfo(value.dtype).min  # the sign of a zero

    edit(directory / "quant" / "expected.safetensors", change)
    status, lines = lines_of(directory, "quant")
    assert status == 1
    assert {line.split()[1] for line in lines if line.endswith("FAIL")} <= {form, f"{form}_stored"}


def test_only_values_of_live_rows_are_compared(copy):
    directory = copy("text", "text_padded")

    def spoil(tensors):
        tensors["logits"][tensors["attention_mask"] == 0] = 1e6
        assert (tensors["attention_mask"] == 0).any()

    edit(directory / "text_padded" / "expected.safetensors", spoil)
    assert lines_of(directory, "text_padded")[0] == 0


def remove(name):
    def change(tensors):
        del tensors[name]

    return change


@pytest.mark.parametrize(
    ("folder", "file", "change", "sentence"),
    [
        ("text_short", "expected", remove("logits"), "no tensor 'logits'"),
        ("text_short", "expected", remove("input_ids"), "no tensor 'input_ids'"),
        ("text_short", "expected", lambda t: t.update(streams=t["streams"][:7]), "streams has 7 layers"),
        ("text_short", "expected", lambda t: t["input_ids"].fill_(115), "index 115 is out of bounds"),
        ("text", "model", remove("layers.3.ffn.experts.5.w2.weight"), "layers.3.ffn.experts.5.w2.weight is missing"),
        ("text_grads", "expected", remove("grad.norm.weight"), "no tensor 'grad.norm.weight'"),
    ],
)
def test_a_missing_tensor_ends_with_2(copy, capsys, folder, file, change, sentence):
    directory = copy("text", *({folder} - {"text"}))
    edit(directory / folder / f"{file}.safetensors", change)
    assert main(["parity", str(directory), "--cases", folder]) == 2
    assert sentence in capsys.readouterr().out


def test_what_cannot_be_run_ends_with_2_and_the_others_still_run(copy, capsys):
    directory = copy("text", "text_one", "text_short")
    (directory / "text_one" / "expected.safetensors").unlink()
    (directory / "mystery").mkdir()
    path = directory / "text" / "expected.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    assert main(["parity", str(directory)]) == 2
    out = capsys.readouterr().out
    assert "no expected.safetensors" in out
    assert "no code path for cases of kind 'mystery'" in out
    assert "cannot be run" in next(line for line in out.splitlines() if line.startswith("text "))
    assert "text_short     logits" in out


def test_a_missing_folder_or_pattern_is_a_users_mistake(tmp_path, capsys):
    assert main(["parity", str(tmp_path / "nowhere")]) == 2
    assert "no folder of golden cases" in capsys.readouterr().err
    assert main(["parity", str(GOLDEN), "--cases", "vision*"]) == 2
    assert "no case in" in capsys.readouterr().err


def test_cases_of_another_size_and_their_own_model_work(tmp_path, make_core, core_config):
    """Expectations from our own model at a size that no golden folder has: 3 streams, 5 experts a token, another window."""
    config = core_config.__class__(
        **{**vars(core_config), "vocab_size": 77, "hidden_size": 96, "hc_mult": 3, "num_experts_per_tok": 5,
           "sliding_window": 5, "num_hidden_layers": 6, "compress_ratios": [0, 3, 3, 1, 1, 1],
           "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 5], "candidate_source_layer_id": 3}
    )  # fmt: skip
    model = make_core(4, config)
    save_policy(model, tmp_path / "text")
    ids = torch.randint(5, 77, (3, 41))
    rows = plain_rows(ids.tolist())
    with torch.no_grad():
        out = model(rows, GraphStore(config, rows), capture=True)
        logits = model.logits(out.hidden)

    def shaped(tensor):
        return tensor[:123].unflatten(0, (3, 41)).contiguous()

    expected = {
        "input_ids": ids, "logits": shaped(logits),
        "streams": torch.stack([shaped(out.captures[f"streams.{layer}"]) for layer in range(6)]),
        **{f"topk_indices.{layer}": shaped(out.captures[f"topk_indices.{layer}"]) for layer in (1, 3, 5)},
        **{f"routes.{layer}": shaped(out.experts[layer]).sort(-1).values for layer in range(6)},
    }  # fmt: skip
    metadata = {"bound": "1e-4", "bound_abs": "1e-3"}
    save_file(expected, tmp_path / "text" / "expected.safetensors", metadata=metadata)
    (tmp_path / "text_tail").mkdir()
    tail = {"input_ids": ids[:1, :9].contiguous(), "logits": shaped(logits)[:1, :9].contiguous()}
    save_file(tail, tmp_path / "text_tail" / "expected.safetensors", metadata=metadata)
    status, lines = lines_of(tmp_path, "*")
    assert status == 0, lines
    assert len(lines) == 1 + 6 + 3 + 6 + 1
    raw = json.loads((tmp_path / "text" / "config.json").read_text())
    raw["text_config"]["sliding_window"] = 6
    (tmp_path / "text" / "config.json").write_text(json.dumps(raw))
    assert lines_of(tmp_path, "text")[0] == 1


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("text_one", lambda tensors: tensors.update(input_ids=tensors["input_ids"][:, :0])),
        ("text_one", lambda tensors: tensors.update(input_ids=tensors["input_ids"] + 1_000_000)),
        ("text_one", lambda tensors: tensors.update(attention_mask=torch.ones(3))),
        ("quant", lambda tensors: tensors.update(x=tensors["x"][:, :7])),
    ],
)
def test_tensors_that_do_not_fit_together_are_named_and_the_other_cases_run(copy, case, change):
    golden = copy("text", "text_one", "text_short", "quant")
    edit(golden / case / "expected.safetensors", change)
    code, lines = lines_of(golden, f"{case},text_short")
    assert code == 2
    assert any(line.startswith(f"{case} ") and "cannot be run: " in line for line in lines)
    assert any(line.startswith("text_short ") and line.endswith("ok") for line in lines)


@pytest.mark.parametrize("bound", ["inf", "nan", "-1", "x"])
def test_a_bound_that_nothing_can_exceed_is_refused(copy, bound):
    golden = copy("quant")
    path = golden / "quant" / "expected.safetensors"
    with safe_open(path, "pt") as archive:
        metadata = archive.metadata() | {"bound": bound}
        tensors = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata=metadata)
    code, lines = lines_of(golden, "quant")
    assert code == 2
    assert "bound must be a finite number >= 0" in lines[0]
