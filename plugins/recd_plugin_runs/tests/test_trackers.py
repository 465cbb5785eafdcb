"""What trackers write, and that a run which goes on writes nothing twice."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from recd_plugin_runs.trackers import Csv, JsonLines, MlFlow, TensorBoard, Tracker, WandB, _flat
from recd_plugins.api import RunEnd, RunEvaluation, RunStart, RunStep
from recd_plugins.interfaces.callback import Quality


def needs(*modules: str) -> Any:
    missing = [module for module in modules if find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{missing} are not installed")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))


def made(name: str, folder: Path) -> Tracker:
    kinds: dict[str, tuple[type[Tracker], dict[str, Any]]] = {
        "csv": (Csv, {"path": folder / "of" / "run.csv"}),
        "jsonl": (JsonLines, {"path": folder / "of" / "run.jsonl"}),
        "tensorboard": (TensorBoard, {"path": folder / "tb"}),
        "wandb": (WandB, {"project": "p", "folder": folder, "mode": "offline"}),
        "mlflow": (MlFlow, {"tracking_uri": f"file:{folder}/ml"}),
    }
    kind, options = kinds[name]
    return kind(kind.Options(**options, every=2))


def start(step: int = 0, rank: int = 0) -> RunStart:
    text = "version: 1\ncallbacks: [{use: a.b}]\n"
    return RunStart(rank, 2, step, 6, (), (), 32, text, ("training.seed=3",))


def train(tracker: Tracker, steps: Sequence[int], rank: int = 0) -> None:
    for step in steps:
        tracker.on_step(RunStep(rank, step, torch.tensor(float(step)), 0.5))
        if step == 4:
            quality = Quality(0.9, 0.75, 10, 0.6, 1.5)
            tracker.on_evaluate(RunEvaluation(rank, step, "test", quality, {"gauc": 0.7}))


def resumed(name: str, folder: Path, saved_at: int = 5, killed_at: int = 6) -> Tracker:
    first = made(name, folder)
    first.on_start(start())
    train(first, range(1, saved_at + 1))
    state = json.loads(json.dumps(first.state_dict()))
    train(first, range(saved_at + 1, killed_at + 1))
    if name == "wandb":  # in one process it has one run at a time
        first.close(completed=False)
    again = made(name, folder)
    again.on_start(start(saved_at))
    again.load_state_dict([state, {}])
    train(again, range(saved_at + 1, 7))
    again.on_end(RunEnd(0, 6, ()))
    return again


EXPECTED = [
    {"step": 2, "loss": 1.5, "learning_rate": 0.5},
    {"step": 4, "loss": 3.5, "learning_rate": 0.5},
    {
        "step": 4,
        "test_normalized_entropy": 0.9,
        "test_auc": 0.75,
        "test_num_samples": 10,
        "test_log_loss": 0.6,
        "test_calibration": 1.5,
        "test_gauc": 0.7,
    },
    {"step": 6, "loss": 5.5, "learning_rate": 0.5},
]


def without_time(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("time", "samples_per_second")
    return [{key: value for key, value in each.items() if key not in timed} for each in records]


@pytest.mark.parametrize("saved_at", [3, 4, 6])
def test_csv_has_each_record_once(tmp_path: Path, saved_at: int) -> None:
    resumed("csv", tmp_path, saved_at)
    with (tmp_path / "of" / "run.csv").open() as file:
        rows = [*csv.DictReader(file)]
    records = [{key: float(value) for key, value in row.items() if value} for row in rows]
    assert without_time(records) == EXPECTED
    assert records[0]["samples_per_second"] > 0


def test_json_lines_have_each_record_once(tmp_path: Path) -> None:
    resumed("jsonl", tmp_path, 3)
    first, *records = map(json.loads, (tmp_path / "of" / "run.jsonl").read_text().splitlines())
    assert first == {"registry": start().registry, "settings": ["training.seed=3"]}
    assert without_time(records) == EXPECTED


def test_a_new_run_leaves_the_file_of_another(tmp_path: Path) -> None:
    for _ in range(3):
        tracker = made("jsonl", tmp_path)
        tracker.on_start(start())
        train(tracker, [1, 2])
    names = sorted(path.name for path in (tmp_path / "of").iterdir())
    assert names == ["run.1.jsonl", "run.2.jsonl", "run.jsonl"]


@pytest.mark.parametrize(("name", "saved_at"), [("csv", 1), ("jsonl", 4)])
def test_what_another_run_wrote_since_is_kept_apart(
    tmp_path: Path, name: str, saved_at: int
) -> None:
    first, other, again = (made(name, tmp_path) for _ in range(3))
    first.on_start(start())
    train(first, range(1, saved_at + 1))
    state = json.loads(json.dumps(first.state_dict()))
    other.on_start(start())
    for step in range(1, 7):
        other.on_step(RunStep(0, step, torch.tensor(7.0), 0.5))
    path = tmp_path / "of" / f"run.{name}"
    # Digits of a time are no figure of the run.
    of_other = re.sub(r'(step": 4, "time": )[0-9.]+', r"\g<1>0.9", path.read_text())
    path.write_text(of_other)
    again.on_start(start(saved_at))
    again.load_state_dict([state])
    train(again, range(saved_at + 1, 7))
    assert path.with_name(f"run.2.{name}").read_text() == of_other
    assert path.read_text().count("\n") == 1 + (1 if saved_at == 4 else len(EXPECTED))


@pytest.mark.parametrize("name", ["csv", "jsonl"])
def test_a_state_of_an_earlier_version_goes_on(tmp_path: Path, name: str) -> None:
    first, again = made(name, tmp_path), made(name, tmp_path)
    first.on_start(start())
    train(first, range(1, 4))
    state = {"records": 1, "steps": 1, "total": 3.0, "rate": 0.5, "last": {"step": 2.0}}
    again.on_start(start(3))
    again.load_state_dict([state])
    train(again, range(4, 7))
    assert len((tmp_path / "of" / f"run.{name}").read_text().splitlines()) == 1 + len(EXPECTED)


def test_they_write_to_this_machine() -> None:
    with pytest.raises(ValueError, match=r"s3://bucket/x is a URL, not a local path"):
        Csv.Options.model_validate({"path": "s3://bucket/x"})
    with pytest.raises(ValueError, match="/dev/zero is a pipe or a device"):
        TensorBoard.Options.model_validate({"path": "/dev/zero"})


def test_only_rank_0_writes(tmp_path: Path) -> None:
    tracker = made("csv", tmp_path)
    tracker.on_start(start(rank=1))
    train(tracker, range(1, 7), rank=1)
    assert tracker.state_dict() == {}
    tracker.on_end(RunEnd(1, 6, ()))
    assert not list(tmp_path.iterdir())


@needs("tensorboard")
def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    resumed("tensorboard", tmp_path, 4)
    shown = EventAccumulator(str(tmp_path / "tb"))
    shown.Reload()
    assert [(e.step, e.value) for e in shown.Scalars("loss")] == [(2, 1.5), (4, 3.5), (6, 5.5)]
    assert [e.step for e in shown.Scalars("test_auc")] == [4]
    (text,) = shown.Tensors("registry/text_summary")
    assert b"callbacks: [{use: a.b}]" in text.tensor_proto.string_val[0]


@needs("mlflow")
def test_mlflow_has_each_step_once(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    tracker = resumed("mlflow", tmp_path, 3)
    client = MlflowClient(f"file:{tmp_path}/ml")
    number = tracker.more_state()["run"]
    values = [(m.step, m.value) for m in client.get_metric_history(number, "loss")]
    assert values == [(2, 1.5), (4, 3.5), (6, 5.5)]
    run = client.get_run(number)
    assert run.info.status == "FINISHED"
    assert run.data.params["callbacks.0.use"] == "a.b"


@needs("wandb")
def test_wandb_goes_on_with_its_run(tmp_path: Path) -> None:
    tracker = resumed("wandb", tmp_path, 4)
    number = tracker.more_state()["run"]
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{number}"))) >= 1


def test_names_of_parameters() -> None:
    value = {"a": [{"b": 1}, {"c d*": [1, 2]}], "e": {}}
    assert _flat(value) == {"a.0.b": "1", "a.1.c d_": "[1, 2]", "e": "{}"}
    (url, long) = _flat({"columns": {"https://a/": 1, "long" * 90: 3}})
    assert url == "columns.https___a_"
    assert len(long) == 250
