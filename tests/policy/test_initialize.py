"""`burnish init`: a folder that loads, that its seed determines, and that is not overwritten by mistake."""

import json

import pytest
import torch

from burnish.configs.cli import main
from burnish.policy import initialize
from burnish.policy.checkpoint.lineage import policy_hash
from burnish.policy.checkpoint.released import load_policy
from burnish.policy.config import ConfigError, InitRun
from burnish.policy.encoding.tokenizer import load_tokenizer
from burnish.policy.model.graph_store import GraphStore
from burnish.policy.model.rows import plain_rows
from burnish.policy.presets import preset


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    out = tmp_path_factory.mktemp("policies") / "tiny"
    assert main(["init", f"out={out}", "seed=3"]) == 0
    return out


def test_a_policy_folder_is_whole(tiny):
    assert sorted(p.name for p in tiny.iterdir() if p.suffix != ".txt") == [
        "burnish.json", "config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    lineage = json.loads((tiny / "burnish.json").read_text())
    assert (lineage["preset"], lineage["stage"], lineage["seed"], lineage["parents"]) == ("tiny", "init", 3, {})
    model = load_policy(tiny)
    assert model.config == preset("tiny")
    ids = load_tokenizer(tiny).encode("list the files")
    assert 0 < len(ids) < 20
    assert max(ids) < model.config.vocab_size
    rows = plain_rows([ids])
    with torch.no_grad():
        logits = model.logits(model(rows, GraphStore(model.config, rows)).hidden)[: len(ids)]
    probs = logits.softmax(-1)
    assert probs.isfinite().all()
    assert probs.max() < 0.1  # fresh weights are sure of nothing


def test_the_seed_decides_the_weights(tiny, tmp_path):
    for name, seed in (("same", 3), ("other", 4)):
        initialize.main(InitRun(out=str(tmp_path / name), seed=seed))
    assert policy_hash(tmp_path / "same") == policy_hash(tiny)
    assert policy_hash(tmp_path / "other") != policy_hash(tiny)


def test_weights_have_the_spread_of_the_config(tiny):
    model = load_policy(tiny)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            assert parameter.std().item() == pytest.approx(model.config.initializer_range, rel=0.1), name
        elif name.endswith(("norm.weight", "_scale")):
            assert (parameter == 1).all(), name
        else:
            assert (parameter == 0).all(), name


def test_a_folder_is_overwritten_only_on_request(tiny, tmp_path, capsys):
    before = policy_hash(tiny)
    assert main(["init", f"out={tiny}"]) == 2
    assert f"out: {tiny} exists already; give another folder or overwrite=true" in capsys.readouterr().err
    assert policy_hash(tiny) == before
    out = tmp_path / "again"
    initialize.main(InitRun(out=str(out), seed=0))
    initialize.main(InitRun(out=str(out), seed=3, overwrite=True))
    assert policy_hash(out) == before


def test_what_cannot_be_made_is_said(tmp_path, capsys):
    assert main(["init", f"out={tmp_path / 'x'}", "preset=huge"]) == 2
    assert "unknown model preset 'huge'" in capsys.readouterr().err
    assert main(["init", f"out={tmp_path / 'x'}", "preset=flash"]) == 2
    assert "preset flash has 551.6 B parameters" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_special_ids_must_be_the_tokenizers(tiny):
    config = preset("tiny")
    initialize.check_vocabulary(config, load_tokenizer(tiny))
    config.eos_token_id = 7
    with pytest.raises(ConfigError, match="eos_token_id must be 1 with this tokenizer, got 7"):
        initialize.check_vocabulary(config, load_tokenizer(tiny))
