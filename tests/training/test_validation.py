"""When a run is validated, what is best of it, and when it stops."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.training import validation_cases

from recd_plugins import load_registry
from recd_plugins.config.schema import ValidationSpec
from recd_plugins.interfaces.callback import Quality
from recd_plugins.runtime.errors import RegistryError
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint_files import (
    Progress,
    ValidationCurve,
    chosen_checkpoint,
    progress_text,
    step_name,
)
from recd_plugins.training.evaluation import Measured, Validation, check_evaluation


def measured(entropy: float, auc: float = 0.5) -> Measured:
    return Quality(entropy, auc, 10), {"gauc": auc}


def spec(**options: Any) -> ValidationSpec:
    return ValidationSpec(every=2, **options)


def test_the_least_or_the_most_is_best() -> None:
    curve = ValidationCurve("auc", "max", [2, 4, 6, 8, 10], [0.5, 0.7, None, 0.7, 0.6])
    assert (curve.best, curve.best_step, curve.stale) == (1, 4, 3)
    curve = ValidationCurve("log_loss", "min", [2, 4], [None, 0.7])
    assert (curve.best_step, curve.stale) == (4, 0)
    curve = ValidationCurve("log_loss", "min", [2], [None])
    assert (curve.best_step, curve.stale) == (None, 1)


def test_it_stops_where_nothing_better_came() -> None:
    validation = Validation(spec(patience=2))
    assert [validation.due(step) for step in range(1, 5)] == [False, True, False, True]
    for step, entropy, best in ((2, 0.9, True), (4, 0.8, True), (6, 0.8, False)):
        assert validation.add(step, measured(entropy)) == best
        assert not validation.stops
        assert not validation.due(step), "it is done"
    assert not validation.add(8, measured(math.nan))
    assert validation.stops
    assert str(validation.report()) == (
        "stopped early, after step 8: the best normalized_entropy of the validations was 0.80000, "
        "after step 4, with no improvement in the next 2 validations. Test figures are those of "
        "step 4"
    )
    again = Validation(spec(patience=2), validation.curve)
    assert again.stops
    assert Validation(spec(metric="auc"), validation.curve).curve.values == []
    # The last step of an earlier run is validated whenever it comes, and counts for no patience.
    ended = Validation(spec(patience=2))
    for step, entropy in ((2, 0.8), (4, 0.9), (5, 0.9)):
        ended.add(step, measured(entropy))
    assert not ended.stops
    # A run that went on without validations since, and has them again, is not over.
    later = Validation(spec(patience=2), validation.curve, step=validation.curve.steps[-1] + 1)
    assert not later.stops


def write_progress(folder: Path, step: int, curve: ValidationCurve | None) -> Path:
    (checkpoint := folder / step_name(step)).mkdir(parents=True)
    text = progress_text(Progress(step, validation=curve))
    (checkpoint / "progress.json").write_text(text)
    return checkpoint


def curve(*values: float | None, every: int = 2) -> ValidationCurve:
    steps = [every * (number + 1) for number in range(len(values))]
    return ValidationCurve("normalized_entropy", "min", steps, list(values))


@pytest.mark.parametrize(
    ("validation", "known", "step", "taken", "said"),
    [
        ("{every: 2}", curve(0.8, 0.7, 0.9), 6, 4, "the best is taken; --checkpoint newest"),
        ("null", curve(0.8, 0.7, 0.9), 9, 9, ""),
        ("{every: 2}", curve(0.8, 0.7, 0.6), 6, 6, ""),
        ("{every: 2}", None, 1, 1, ""),
        ("{every: 1}", curve(0.8, 0.9, every=1), 2, 2, ""),
        ("null", None, 3, 3, ""),
    ],
)
def test_the_best_checkpoint_of_a_validated_run_is_taken(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    validation: str,
    known: ValidationCurve | None,
    step: int,
    taken: int,
    said: str,
) -> None:
    path = tmp_path / "r.yaml"
    kept = f"{validation}, checkpoint: {{path: {tmp_path / 'kept'}}}"
    path.write_text(REGISTRY.format(test_rows=4, validation=kept))
    for each in {4, step} if known and known.best_step == 4 else {step}:
        write_progress(tmp_path / "kept", each, known)
    registry = load_registry(path)
    assert chosen_checkpoint(registry).name == step_name(taken)
    shown = capsys.readouterr().err
    assert said in shown if said else not shown
    assert chosen_checkpoint(registry, "newest").name == step_name(step)
    assert not capsys.readouterr().err


def test_test_figures_are_those_of_the_best_step(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    kept, without_end = tmp_path / "kept", tmp_path / "whole"
    kept.mkdir()
    without_end.mkdir()
    path.write_text(OVERFITTED.format(folder=kept))
    result = run_on_ranks(validation_cases.run, 2, path)[0]
    found = result["validation"]
    assert found["steps"] == [4, 8, 12, 16, 18]
    best = found["steps"].index(found["best_step"])
    assert best < 4, "it does not overfit"
    assert result["test"]["accuracy"] == pytest.approx(found["values"][best], abs=1e-12)
    again = run_on_ranks(validation_cases.run, 2, path)[0]
    assert again["first_step"] == 18
    assert again["test"] == pytest.approx(result["test"], abs=1e-9)
    assert again["validation"] == found
    longer = run_on_ranks(validation_cases.run, 2, path, ("training.steps=22",))[0]
    whole = path.read_text().replace(str(kept), str(without_end))
    path.write_text(whole.replace("steps: 18", "steps: 22"))
    assert longer["losses"] == run_on_ranks(validation_cases.run, 2, path)[0]["losses"]


OVERFITTED = """version: 1
dataset: {{use: dlrm.random, options: {{rows: 64, test_rows: 50, sparse: {{user: 90, item: 90}}}}}}
converter: {{use: recd.kjt}}
metrics: [{{use: torchrec.rec_metrics, options: {{names: [accuracy]}}}}]
model: {{embedding_dim: 4, num_embeddings: 100, bottom_mlp: [4], top_mlp: [16]}}
training:
  {{batch_size: 8, ranks: 2, device: cpu, epochs: 9, steps: 18, learning_rate: 0.3,
   validation: {{every: 4, metric: accuracy, mode: max}}, checkpoint: {{path: {folder}, keep: 1}}}}
"""


REGISTRY = """version: 1
dataset: {{use: dlrm.random, options: {{rows: 8, test_rows: {test_rows}, sparse: {{user: 9}}}}}}
converter: {{use: recd.kjt}}
model: {{}}
training: {{batch_size: 2, validation: {validation}}}
"""


def load_and_check(path: Path) -> None:
    check_evaluation(load_registry(path))


@pytest.mark.parametrize(
    ("test_rows", "validation", "wrong"),
    [
        (4, "{every: 2, metric: gauc}", "metric gauc needs mode: min or max, which is known of no"),
        (4, "{every: 2, metric: auc, mode: min}", "mode: min of auc is its worst; leave out mode"),
        (0, "{every: 2}", "measures the test split, and dlrm.random has no test split"),
    ],
)
def test_what_could_measure_nothing(
    tmp_path: Path, test_rows: int, validation: str, wrong: str
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(REGISTRY.format(test_rows=test_rows, validation=validation))
    with pytest.raises(RegistryError, match=wrong):
        load_and_check(path)
