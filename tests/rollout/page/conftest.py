"""A run that was killed, and a pipeline that is under way."""

import json

import pytest
from run_folders import write_eval, write_rl

from burnish.policy.training.metrics import MetricLogger, WandbMode
from burnish.rollout.page import training
from burnish.rollout.page.markup import Html


@pytest.fixture
def no_charts(monkeypatch):
    """For pages that are not about their charts, which cost a second a page."""
    monkeypatch.setattr(training, "chart", lambda *arguments: Html(""))


@pytest.fixture
def rl(tmp_path):
    """An RL run whose process was killed: everything flushed, nothing closed properly, half a line of metrics."""
    write_rl(tmp_path / "rl").close()
    with (tmp_path / "rl" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train/lo')
    return tmp_path / "rl"


@pytest.fixture
def pipeline(tmp_path):
    """SFT and RL with three evaluations, whose names sort otherwise than they ran."""
    run = tmp_path / "pipeline"
    write_rl(run / "rl").close()
    with MetricLogger(run / "sft", mode=WandbMode.disabled) as metrics:
        metrics.log({"train/loss": 1.0, "train/tokens_per_s": 100.0}, step=1)
    manifest = {"stage": "sft", "parents": {"policy": "d" * 64}, "finished": True, "policy": "a" * 64, "steps": 1}
    (run / "sft" / "manifest.json").write_text(json.dumps(manifest))
    write_eval(run / "eval" / "base", [False] * 10, "base", written=1.0)
    write_eval(run / "eval" / "sft", [True] * 5 + [False] * 5, "sft", written=2.0)
    write_eval(run / "eval" / "alast", [True] * 4 + [None], "alast")
    stages = {
        "init": {"verb": "init", "settings": "e" * 64, "parents": {}, "output": {"base/model.safetensors": "d" * 64}}
    }
    (run / "manifest.json").write_text(json.dumps({"code": "0.1.0", "stages": stages}))
    (run / "stages").mkdir()
    stages = ["synth", "init", "eval-base", "sft", "eval-sft", "rl", "eval-alast"]
    records = [{"stage": stage, "pid": 1, "started": 0.0} for stage in stages]
    (run / "stages" / "attempts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run
