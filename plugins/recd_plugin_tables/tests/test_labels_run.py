"""Several labels, some of them missing, from a table to scores and to a served model."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ruamel.yaml import YAML
from tests.commands import recd, refusal

from recd_plugin_ranking.metrics import figures, means

ROWS = 480


def clicks() -> pa.Table:
    draw = np.random.default_rng(2)
    items, users = draw.integers(0, 12, ROWS), np.arange(ROWS) // 6 % 20
    stars = np.where(draw.random(ROWS) < 0.2, np.nan, 1 + items % 5 + draw.normal(0, 0.1, ROWS))
    click = (draw.random(ROWS) < 0.2 + 0.05 * items).astype(float)
    return pa.table(
        {
            "user": users,
            "request_id": np.arange(ROWS) // 3,
            "item": items,
            "at": 1_700_000_000 + np.arange(ROWS) * 60,
            "click": [None if i % 7 == 3 else int(click[i]) for i in range(ROWS)],
            "stars": pa.array(stars, from_pandas=True),
            "seconds": draw.gamma(2, 20, ROWS),
        }
    )


@pytest.mark.slow
def test_from_a_table_to_scores(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    pq.write_table(clicks(), "clicks.parquet")
    recd("init", "clicks.parquet", "my.yaml", "--label", "click,good=stars>=3,stars,seconds")
    written = YAML(typ="safe").load(Path("my.yaml"))
    labels = written["dataset"]["options"]["label"]
    assert labels == [
        {"name": "click"},
        {"name": "good", "column": "stars", "positive_from": 3.0},
        {"name": "stars", "type": "regression"},
        {"name": "seconds", "type": "regression", "loss": "log_mse"},
    ]
    watch = {"name": "watch", "column": "click", "type": "weighted", "value": "seconds"}
    labels[-1] = {**watch, "weight": 0.1}
    written["model"] |= {"multi_task": {"kind": "mmoe", "experts": 2}, "top_mlp": [8]}
    written["metrics"] = [{"use": "ranking.metrics", "options": {"names": ["gauc"]}}]
    written["training"] |= {"batch_size": 32, "epochs": 2, "validation": {"every": 10}}
    with Path("my.yaml").open("w") as file:
        YAML().dump(written, file)

    wrong = refusal("run", "my.yaml", "training.validation.metric=auc")
    assert "metric 'auc' belongs to no label of this dataset. Use one of: 'loss', " in wrong
    recd("run", "my.yaml", "--json", "run.json")
    run = json.loads(Path("run.json").read_text())
    assert run["validation"]["metric"] == "loss"
    of_model = ["click.auc", "good.auc", "stars.rmse", "watch.log_loss", "loss"]
    assert set(of_model) <= run["test"].keys()
    assert run["test"]["stars.num_samples"] < run["test"]["num_samples"]
    assert run["train"]["stars.r2"] > 0
    assert list(run["calibration_bins"]) == ["click", "good", "watch"]
    validated = "training.validation.metric=good.auc"
    recd("run", "my.yaml", validated, "training.epochs=1", "training.ranks=2")

    recd("evaluate", "my.yaml", "--run", 1, "--json", "quality.json", "--by", "item")
    quality = json.loads(Path("quality.json").read_text())
    for name in of_model:
        assert quality["test"][name] == pytest.approx(run["test"][name], rel=1e-5)
    assert quality["baselines"]["base_rate"].keys() >= {"click.log_loss", "good.log_loss"}
    assert quality["by"]["item"][0].keys() >= {"rows", "click.auc", "stars.rmse"}
    said = recd("evaluate", "my.yaml", "--run", 1, "--by", "item")
    assert "good log loss" in said
    assert max(map(len, said.splitlines()[:60])) < 90  # a table per label
    test = clicks().slice(ROWS - run["test"]["num_samples"])
    before = clicks().slice(0, int(ROWS * 0.9))  # no validation split: fewer than 2,000 rows
    stars, mean = test["stars"].to_numpy(), np.nanmean(before["stars"].to_numpy())
    expected = np.sqrt(np.nanmean((stars - mean) ** 2))
    assert quality["baselines"]["base_rate"]["stars.rmse"] == pytest.approx(expected, rel=1e-5)
    assert "best loss" in recd("runs", "my.yaml").replace("\n", " ")
    recd("report", "runs/my", "-o", "report.html")

    recd("predict", "my.yaml", "clicks.parquet", "--run", 1, "-o", "scores.parquet")
    scores = pq.read_table("scores.parquet")
    names = [f"score_{name}" for name in ("click", "good", "stars", "watch")]
    assert [name for name in scores.column_names if name.startswith("score")] == names
    good, stars = (scores[name].to_numpy() for name in names[1:3])
    labels = test["stars"].to_numpy() >= 3
    known = np.isfinite(test["stars"].to_numpy())
    of = test["request_id"].to_numpy()[known], np.log(good / (1 - good))[-len(test) :][known]
    gauc = means([figures(*of, labels[known], [1])])["gauc"]
    assert quality["test"]["good.gauc"] == pytest.approx(gauc, abs=1e-6)
    assert ((good > 0) & (good < 1)).all()
    assert np.corrcoef(stars, clicks()["item"].to_numpy() % 5)[0, 1] > 0.5

    recd("export", "my.yaml", "--run", 1, "-o", "exported")
    signature = json.loads(Path("exported/signature.json").read_text())
    outputs = [task["output"] for task in signature["tasks"]]
    assert outputs[1:3] == ["a probability", "the predicted value"]
    pytest.importorskip("starlette")
    monkeypatch.syspath_prepend(request.config.rootpath / "examples/serving")
    before = {*sys.modules}
    try:
        scorer = import_module("serve").Scorer(Path("exported"))
        body = Path("exported/sample_request.json").read_bytes()
        served = scorer.score(body)
    finally:
        for name in {"encode", "serve"} - before:
            sys.modules.pop(name, None)
    torch.set_num_threads(1)
    assert [*served] == ["click", "good", "stars", "watch"]
    first = [scores[name][0].as_py() for name in names]
    sample = json.loads(body)
    assert sample["candidates"][0]["item"] == clicks()["item"][0].as_py()
    assert [served[name][0] for name in served] == pytest.approx(first, rel=1e-4)  # type: ignore[call-overload]
