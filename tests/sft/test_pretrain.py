"""Pre-training: recall documents ask for nothing that their context does not decide; the loop resumes exactly and learns."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from burnish.configs import cli
from burnish.configs.schema import compose
from burnish.policy.checkpoint.lineage import policy_hash
from burnish.policy.checkpoint.released import load_policy
from burnish.policy.encoding.subvocabulary import tiny_tokenizer
from burnish.policy.model.graph_store import GraphStore
from burnish.policy.training.metrics import read_metrics
from burnish.policy.training.packing import pack
from burnish.policy.training.step import TrainStep
from burnish.sft import pretrain
from burnish.sft.config import RecallConfig
from burnish.sft.data import DataError
from burnish.sft.plain_text import load_text
from burnish.sft.recall import MAX_SPAN, RecallDocuments, word_ids

TOKENIZER = tiny_tokenizer()


def documents(seed=0, **settings) -> RecallDocuments:
    shares = {"repeat": 0.0, "turn": 0.0, "lookup": 0.0} if settings.keys() & {"repeat", "turn", "lookup"} else {}
    return RecallDocuments(TOKENIZER, RecallConfig(**shares | settings), seed)


# ------------------------------------------------------------------ recall documents


def test_words_are_words_and_marks():
    words = word_ids(TOKENIZER)
    assert not set(words) & TOKENIZER.added_ids
    text = {TOKENIZER.token(token_id) for token_id in words}
    assert {" amber", "amber", "-wheel", " the", ">", ".", "echo"} <= text
    assert not text & {"a", "7", "\n", " ", "\x00", "\ufffd"}


def test_a_document_is_a_function_of_seed_and_index():
    first, again, other = documents(3), documents(3), documents(4)
    assert first.slice(5, 9) == again.slice(5, 9)
    assert [s.ids for s in first.slice(0, 8)][5:] == [s.ids for s in again.slice(5, 8)]
    assert first.document(5) != other.document(5)
    assert documents(pretrain.HELD_OUT).document(0) not in first.slice(0, 50)


@pytest.mark.parametrize(("layout", "end"), [("repeat", 0), ("turn", 1)])
def test_a_repeat_asks_for_the_words_it_has_shown(layout, end):
    special = TOKENIZER.special
    for sample in documents(**{layout: 1.0}).slice(0, 50):
        trained = [i for i, is_target in zip(sample.ids, sample.loss_mask, strict=True) if is_target]
        words = trained[: len(trained) - end]
        assert 8 <= len(words) <= 24
        assert trained[len(words) :] == [special.eos] * end
        start = sample.ids.index(words[0])
        assert list(sample.ids[start : start + len(words)]) == words
        assert not any(sample.loss_mask[: -len(trained)])
        assert len(sample.ids) <= RecallConfig().max_tokens


def test_a_lookup_asks_only_for_what_follows_its_cue():
    seen = set()
    for sample in documents(lookup=1.0).slice(0, 50):
        ids = list(sample.ids)
        shown = ids[1 : ids.index(TOKENIZER.special.user)]
        assert len(set(shown)) == len(shown)
        assert not any(sample.loss_mask[: len(shown) + 3])
        length = 0
        for place in range(len(shown) + 2, len(ids)):
            if sample.loss_mask[place]:
                assert ids[place] == shown[shown.index(ids[place - 1]) + 1]
                length += 1
            else:
                seen.add(length)
                length = 0
        assert len(ids) <= RecallConfig().max_tokens
    assert seen == set(range(MAX_SPAN + 1))  # 0 before the first cue


def test_shares_of_layouts_are_drawn():
    drawn = documents(repeat=3.0, turn=1.0).slice(0, 400)
    turns = sum(sample.ids[1] == TOKENIZER.special.user for sample in drawn)
    assert 70 < turns < 130


def test_too_few_words_is_a_mistake_of_the_user():
    with pytest.raises(ValueError, match=r"data\.recall\.max_words=5000, but tokenizer tiny has only"):
        documents(max_words=5000)
    with pytest.raises(ValueError, match="not all 0"):
        documents(lookup=0.0)


# ------------------------------------------------------------------ plain text


def test_text_is_cut_into_contexts_without_losing_a_token(tmp_path):
    path = tmp_path / "text.jsonl"
    texts = ["the amber wheel " * 20, "one line"]
    path.write_text("".join(json.dumps({"text": text, "url": "u"}) + "\n" for text in texts))
    dataset = load_text(path, 16, TOKENIZER)
    special = TOKENIZER.special
    for line, text in enumerate(texts, start=1):
        pieces = [row for row in dataset if row["line"] == line]
        predicted = [i for row in pieces for i, m in zip(row["ids"], row["loss_mask"], strict=True) if m]
        assert predicted == [*TOKENIZER.encode(text), special.eos]
        assert pieces[0]["ids"][0] == special.bos
        assert max(len(row["ids"]) for row in pieces) <= 16
    dataset.to_parquet(str(tmp_path / "ids.parquet"))
    with pytest.raises(DataError, match="field 'text' is missing"):
        load_text(tmp_path / "ids.parquet", 16, TOKENIZER)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ('{"text": \n', r"text\.jsonl line 2: not JSON"),
        ('["text"]\n', r"line 2: expected a JSON object, got list"),
        ('{"txt": "a"}\n', r"line 2: field 'text' is missing"),
        ('{"text": 3}\n', r"line 2: 'text' must be a string that is not empty, got 3"),
        ('{"text": ""}\n', r"line 2: 'text' must be a string"),
        ('{"text": "\\ud800"}\n', r"line 2: text has a lone surrogate"),
    ],
)
def test_malformed_text_is_named(tmp_path, bad, sentence):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "fine"}\n' + bad)
    with pytest.raises(DataError, match=sentence):
        load_text(path, 16, TOKENIZER)


# ------------------------------------------------------------------ the run


def words(policy: Path, out: Path, *more: str) -> list[str]:
    settings = ["batch.batch_size=2", "train.warmup_steps=1", "evaluate_every=2", "num_heldout=4", "wandb=disabled"]
    return ["pretrain", f"policy={policy}", f"out={out}", "steps=4", "checkpoint_every=2", *settings, *more]


class Killed(RuntimeError):
    pass


def test_a_run_that_was_stopped_equals_the_uninterrupted_one(tmp_path, tiny_policy, monkeypatch, capsys):
    assert cli.main(words(tiny_policy, tmp_path / "whole")) == 0
    plain_step, calls = TrainStep.step, []

    def dies(self, *args, **kwargs):
        calls.append(self.num_steps)
        if len(calls) == 4:  # step 3 is done, its state is not kept: the run goes on from step 2
            raise Killed
        return plain_step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "step", dies)
        with pytest.raises(Killed):
            cli.main(words(tiny_policy, tmp_path / "broken"))
    assert not (tmp_path / "broken" / "policy").exists()
    assert cli.main(words(tiny_policy, tmp_path / "broken")) == 0

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    weights, resumed = (load_file(run / "policy" / "model.safetensors") for run in (whole, broken))
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    kept = ("step", "train/loss", "train/grad_norm", "train/lr", "recall/token_accuracy", "recall/exact")
    lines = [[[r.get(k) for k in kept] for r in read_metrics(run / "metrics.jsonl")] for run in (whole, broken)]
    assert lines[0] == lines[1]
    assert [line[0] for line in lines[0] if line[-1] is not None] == [2, 4]
    lineage = json.loads((broken / "policy" / "burnish.json").read_text())
    assert (lineage["stage"], lineage["steps"]) == ("pretrain", 4)
    assert lineage["parents"] == {"policy": policy_hash(tiny_policy)}
    assert cli.main(words(tiny_policy, whole)) == 0  # done already
    assert cli.main(words(tiny_policy, whole, "train.seed=1")) == 2
    assert "holds another run (config.yaml differs)" in capsys.readouterr().err


def test_recall_accuracy_counts_tokens_and_whole_documents(tiny_policy):
    """Targets are set to what the policy says, but for one token of the third document."""
    model = load_policy(tiny_policy)
    samples = documents(min_words=8, max_words=12).slice(0, 4)
    batches = pack(samples, 64)
    assert len(batches) > 1
    for batch in batches:
        with torch.no_grad():
            output = model(batch.rows, GraphStore(model.config, batch.rows))
            batch.target[batch.rows.decoder.index] = model.logits(output.hidden).argmax(-1)
        wrong = torch.nonzero(batch.loss_mask & (batch.rollout == 2)).flatten()[:1]
        batch.target[wrong] = (batch.target[wrong] + 1) % TOKENIZER.vocab_size
    num_targets = sum(sum(sample.loss_mask) for sample in samples)
    expected = {"recall/token_accuracy": 1 - 1 / num_targets, "recall/exact": 3 / 4}
    assert pretrain.recall_accuracy(model, batches) == pytest.approx(expected)


def test_text_is_trained_on(tmp_path, tiny_policy):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "the amber wheel is a large wheel"}\n' * 8)
    settings = ["data.kind=text", f"data.path={path}", "data.max_tokens=16", "train.lr=5e-3", "train.warmup_steps=0"]
    assert cli.main(words(tiny_policy, tmp_path / "out", *settings)) == 0
    losses = [record["train/loss"] for record in read_metrics(tmp_path / "out" / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.3
    lineage = json.loads((tmp_path / "out" / "policy" / "burnish.json").read_text())
    assert set(lineage["parents"]) == {"policy", "data"}


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["policy=nowhere"], "no policy folder at nowhere"),
        (["data.kind=text", "data.path=nowhere.jsonl"], "no data file at nowhere.jsonl"),
        (["data.kind=text"], "data.path goes with data.kind=text, got data.kind=text and ''"),
        (["data.kind=tokens"], "data.kind: expected recall|text, got 'tokens'"),
        (["batch.tokens_per_micro_batch=32"], "cannot hold a document of 56 tokens"),
        (["data.recall.min_words=30"], "expected 2 <= min_words <= max_words, got 30 and 24"),
        (["steps=0"], "steps must be >= 1, got 0"),
    ],
)
def test_mistakes_exit_with_2_and_a_sentence(tmp_path, tiny_policy, more, sentence, capsys):
    given = [word for word in words(tiny_policy, tmp_path / "out") if not more[0].startswith(word.split("=")[0] + "=")]
    assert cli.main([*given, *more]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert not (tmp_path / "out").exists()


def test_defaults_compose():
    run = compose("pretrain", ["policy=a", "out=b"])
    assert run.batch.tokens_per_micro_batch >= run.data.recall.max_tokens
