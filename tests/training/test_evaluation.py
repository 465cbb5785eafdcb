"""Evaluation of tables whose rows do not fill batches, for processes of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.plugin_files import write_plugins
from tests.sharded import CPU
from tests.small_registry import random_rows, write_registry
from torch import Tensor, nn
from torchrec.metrics.calibration import CalibrationMetric
from torchrec.metrics.metrics_config import RecTaskInfo
from torchrec.metrics.ne import NEMetric

from recd_plugins import load_registry
from recd_plugins.compat.lookup_kernels import step_counts
from recd_plugins.config.schema import ValidationSpec
from recd_plugins.interfaces.callback import Quality
from recd_plugins.runtime.errors import RegistryError, in_a_line
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint_files import (
    Progress,
    ValidationCurve,
    progress_text,
    step_name,
)
from recd_plugins.training.evaluation import (
    Measured,
    Metrics,
    Validation,
    check_evaluation,
    evaluate,
    steps,
)
from recd_plugins.training.finite import FiniteRun
from recd_plugins.training.quality import measure
from recd_plugins.training.run_folders import chosen_checkpoint
from recd_plugins.training.sharded_model import build_sharded_model
from recd_plugins.training.trainer import Job, train

SESSIONS = """
class Sessions(Metric):
    "Sessions and their rows."
    name = "acme.sessions"

    def start(self):
        return []

    def update(self, state, batch):
        return state + batch.sessions.tolist()

    def results(self, states):
        seen = [each for state in states for each in state]
        return {"rows": len(seen), "sessions": len(set(seen))}
"""


def write_table(path: Path, num_rows: int) -> None:
    """Sessions of three rows, named by words, whose rows have the same ``tags``."""
    rows = range(num_rows)
    table = {
        "session_id": pa.array([f"s{row // 3}" for row in rows]),
        "ts": pa.array(rows, pa.int64()),
        "label": pa.array([row * 7 % 5 % 2 for row in rows], pa.int8()),
        "number": pa.array([row % 6 + row / 64 for row in rows], pa.float32()),
        "item": pa.array([[row % 100] for row in rows], pa.list_(pa.int64())),
        "tags": pa.array([[row // 3 % 20, 7] for row in rows], pa.list_(pa.int64())),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), path, row_group_size=20)


def sharded(folder: Path, case: str) -> tuple[Any, Any, Callable[[], Any]]:
    """Return the prepared run, its model, and what makes its pipeline."""
    registry = load_registry(folder / f"{case}.yaml", plugins_dir=folder / "plugins")
    parts = build_sharded_model(registry, "plugins", CPU)
    pipeline = partial(parts.prepared.train_pipeline, parts.dmp, parts.optimizer, CPU)
    return parts.prepared, parts.dmp, pipeline


def evaluated(rank: int, world_size: int, folder: Path, cases: list[str]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        prepared, dmp, pipeline = sharded(folder, case)
        # Every rank reads everything, in batches that the rows fill, before a pipeline takes over.
        ones = prepared.with_training({"batch_size": 5, "workers": 0})
        logits, labels = [], []
        with torch.no_grad(), ones.dataloader(rank=0, world_size=1, split="test") as batches:
            for batch in batches:
                _, (_, of_batch, their_labels) = dmp(batch)
                logits.append(of_batch)
                labels.append(their_labels)
        finite = FiniteRun(case)
        quality, metrics = evaluate(prepared, dmp, pipeline(), rank, world_size, CPU, finite)
        pair = torch.cat(logits), torch.cat(labels)
        found.append({**quality.figures(), **metrics, "pair": pair})
    return found


def counted(rank: int, world_size: int, folder: Path, case: str) -> tuple[list[int], list[int]]:
    """Steps that kernels have counted after two steps, and after an evaluation.

    They count each lookup, as FBGEMM's do on CUDA.
    """
    prepared, dmp, make_pipeline = sharded(folder, case)
    counts: list[Tensor] = []
    for module in dmp.modules():
        for part in chain.from_iterable(each.modules() for each in getattr(module, "_lookups", ())):
            if own := step_counts([getattr(part, "emb_module", nn.Module())]):
                counts += own
                part.register_forward_hook(partial(_count, own))
    pipeline = make_pipeline()
    with prepared.dataloader(rank=rank, world_size=world_size) as loader:
        batches = islice(loader, 2)
        assert len(list(steps(pipeline, batches, prepared.registry, dmp.module))) == 2
    before = [int(count) for count in counts]
    evaluate(prepared, dmp, pipeline, rank, world_size, CPU, FiniteRun(case))
    return before, [int(count) for count in counts]


def _count(counts: list[Tensor], *_: object) -> None:
    for count in counts:
        count.add_(1)


ROWS = {"long": 45, "short": 5}
CASES = {
    f"{test}-{converter}-{workers}": (test, converter, workers)
    for test, converter, workers in [
        ("long", "recd.kjt", 0),
        ("long", "recd.ikjt", 0),
        ("long", "recd.ikjt", 1),
        ("short", "recd.ikjt", 0),
    ]
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    write_table(folder / "train" / "a.parquet", 32)
    for name, num_rows in ROWS.items():
        write_table(folder / name / "a.parquet", num_rows)
    write_plugins(folder, SESSIONS, "Sessions")
    for case, (test, converter, workers) in CASES.items():
        options = {"path": f"{folder}/train", "test_path": f"{folder}/{test}"}
        write_registry(
            folder,
            f"{case}.yaml",
            dataset={"use": "recd.session_parquet", "options": options},
            converter={"use": converter},
            pooling=[{"use": "recd.mean", "features": ["tags"]}],
            metrics=[{"use": "acme.sessions"}],
            training={"batch_size": 8, "workers": workers},
        )
    return folder


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_row_is_scored_once(folder: Path, world_size: int) -> None:
    for of_rank in run_on_ranks(evaluated, world_size, folder, list(CASES)):
        for (test, _, _), found in zip(CASES.values(), of_rank, strict=True):
            _check(found, ROWS[test])


def test_an_evaluation_is_no_step_to_kernels(folder: Path) -> None:
    case = next(iter(CASES))
    ((before, after),) = run_on_ranks(counted, 1, folder, case)
    assert before == after
    assert before
    assert min(before) >= 2


def _check(found: dict[str, Any], num_rows: int) -> None:
    logits, labels = (each.double() for each in found["pair"])
    assert len(labels) == len(logits.unique()) == num_rows  # of ties an order decides
    assert found["num_samples"] == found["rows"] == num_rows
    assert found["sessions"] == -(-num_rows // 3)
    higher = (logits[labels == 1, None] - logits[labels == 0]).sign()
    assert found["auc"] == pytest.approx(float((higher.mean() + 1) / 2), abs=1e-6)
    entropy = torch.nn.functional.binary_cross_entropy
    of_base = entropy(torch.full_like(labels, float(labels.mean())), labels)
    loss = float(entropy(logits.sigmoid(), labels))
    assert found["log_loss"] == pytest.approx(loss, rel=1e-5)
    assert found["normalized_entropy"] == pytest.approx(loss / float(of_base), rel=1e-5)
    calibration = float(logits.sigmoid().sum() / labels.sum())
    assert found["calibration"] == pytest.approx(calibration, rel=1e-5)


METRIC = """
class Wrong(Metric):
    "The share of samples whose likelier label is wrong."
    name = "acme.wrong"

    class Options(PluginOptions):
        fault: str = ""

    def start(self):
        return [0, 0]

    def update(self, state, batch):
        wrong = (batch.predictions > 0.5) != (batch.labels > 0.5)
        state[0], state[1] = state[0] + int(wrong.sum()), state[1] + len(wrong)
        return state

    def results(self, states):
        if self.options.fault == "results":
            return 1 / 0
        wrong, seen = map(sum, zip(*states))
        name = "log_loss" if self.options.fault == "taken" else "error_rate"
        return {name: wrong / seen}
"""


def results(
    rank: int, world_size: int, path: Path, faults: Sequence[str]
) -> list[dict[str, float] | str]:
    """Return the metrics of ``{fault}.yaml``, or the error. The last rank sees no sample."""
    found: list[dict[str, float] | str] = []
    for fault in faults:
        registry = load_registry(path / f"{fault}.yaml", plugins_dir=path / "plugins")
        try:
            metrics = Metrics(registry.path, registry.entries("metric"))
            if rank < world_size - 1:
                labels = torch.tensor([0.0, 1.0, 0.0, float(rank == 0)])
                metrics.update(torch.tensor([-1.0, 1.0, 2.0, -2.0]), labels)
            found.append(metrics.results())
        except Exception as error:
            found.append(in_a_line(error))
    return found


def test_samples_of_all_ranks_count_and_faults_are_told(tmp_path: Path) -> None:
    write_plugins(tmp_path, METRIC, "Wrong")
    said = {
        "": {"error_rate": 3 / 8},  # 2 of 4 on rank 0, 1 of 4 on rank 1
        "taken": ":6 metrics[0]: metric 'log_loss' of plugin 'acme.wrong'",
        "results": "acme.wrong' failed in results (",
        "twice": ":6 metrics[1]: metric 'error_rate' of plugin 'acme.wrong'",
    }
    for fault in said:
        entry = {"use": "acme.wrong", "options": {"fault": fault}}
        write_registry(tmp_path, f"{fault}.yaml", metrics=[entry] * (1 + (fault == "twice")))
    for found in run_on_ranks(results, 3, tmp_path, list(said)):
        for result, expected in zip(found, said.values(), strict=True):
            assert result == expected or str(expected) in str(result)


def test_samples_that_tie_count_half() -> None:
    torch.manual_seed(0)
    logits = torch.randn(500, dtype=torch.double)
    labels = (torch.rand(500) < torch.sigmoid(logits)).double()
    order = labels.argsort()
    for rows in (order, order.flip(0)):
        of_all = labels[rows]
        assert measure(torch.zeros_like(of_all), of_all).auc == 0.5
        assert measure(20 + 5 * of_all, of_all).auc == 1
        few = logits[rows].round()
        higher = (few[of_all == 1, None] - few[of_all == 0]).sign()
        assert measure(few, of_all).auc == pytest.approx(float((higher.mean() + 1) / 2))


@pytest.mark.parametrize("name", ["mixed", "negative"])
def test_figures_are_those_of_torchrec(name: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, dtype=torch.double) * 9
    labels = torch.randint(2, (200,)).double() if name == "mixed" else torch.zeros(200).double()
    found = measure(logits, labels)
    batch: Any = {
        "predictions": {"task": torch.sigmoid(logits)},
        "labels": {"task": labels},
        "weights": {"task": torch.ones_like(labels)},
    }
    task = RecTaskInfo(name="task", label_name="task", prediction_name="task")
    values = {}
    for kind, more in ((NEMetric, {"include_logloss": True}), (CalibrationMetric, {})):
        metric = kind(1, 0, 200, [task], window_size=200, **more)
        metric.update(**batch)
        values |= {key.partition("|")[2]: float(v) for key, v in metric.local_compute().items()}
    assert found.calibration == pytest.approx(values["local_lifetime_calibration"])
    assert found.log_loss == pytest.approx(values["local_lifetime_logloss"] * math.log(2))
    if name == "mixed":
        assert found.normalized_entropy == pytest.approx(values["local_lifetime_ne"])
    else:
        assert math.isnan(found.normalized_entropy)
        assert math.isnan(found.auc)
    # Deciles of the predictions, lowest first.
    order = logits.argsort()
    for (count, predicted, observed), rows in zip(found.bins, order.split(20), strict=True):
        assert count == 20
        assert predicted == pytest.approx(float(torch.sigmoid(logits)[rows].mean()))
        assert observed == float(labels[rows].mean())
    (whole,) = measure(torch.zeros(5).double(), torch.ones(5).double()).bins
    assert whole == (5, 0.5, 1.0)


CLOSE = {
    "middling": [-1.0, 0, 1e-3, 1.002, 1.003],
    "ends of the probabilities": [-30.0, -29.99, 17, 17.01, 29.99],
    "huge": [-1e9, -1.0001e9, 1e6, 1.0001e6],
    "infinite": [-torch.inf, 0, torch.inf],
}


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
@pytest.mark.parametrize("name", CLOSE)
def test_rounding_breaks_no_tie(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact = torch.tensor(CLOSE[name], dtype=torch.double)[torch.randint(len(CLOSE[name]), (300,))]
    labels = torch.randint(2, (300,)).double()
    ulps = torch.randint(-3, 4, (300,)) * torch.finfo(torch.float).eps
    rounded = (exact + ulps * exact.abs().clamp(1, 1e30)).to(dtype)
    expected = measure(exact, labels).auc
    assert measure(rounded.double(), labels).auc == pytest.approx(expected, abs=1e-12)
    if name != "huge":  # whose probabilities are 0 and 1
        again = rounded.double().sigmoid().logit()
        assert measure(again, labels).auc == pytest.approx(expected, abs=1e-12)


def test_close_scores_of_a_dense_sample_are_still_ranked() -> None:
    torch.manual_seed(0)
    logits = torch.linspace(-0.1, 0.1, 300_000, dtype=torch.double)  # all of them close
    labels = (torch.rand_like(logits) < torch.sigmoid(logits)).double()
    positives = torch.arange(1, len(logits) + 1)[labels == 1].double()
    wins = positives.sum() - len(positives) * (len(positives) + 1) / 2
    exact = float(wins / len(positives) / (len(labels) - len(positives)))
    assert measure(logits, labels).auc == pytest.approx(exact, abs=1e-6)


def run(rank: int, world_size: int, path: Path, settings: tuple[str, ...] = ()) -> dict[str, Any]:
    return train(rank, world_size, Job(path, settings=settings)).as_json()


def measured(entropy: float) -> Measured:
    return Quality(entropy, 0.5, 10), {"gauc": 0.5}


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
    assert str(validation) == (
        "the best normalized entropy of the validations was 0.80000, after step 4. Test figures "
        "are those of step 4, and optimistic, because the test split selected this step. For "
        "unbiased figures, add a validation split to the dataset"
    )
    assert validation.stopped == (
        "stopped early after step 8: normalized entropy has not improved for 2 validations. Test "
        "metrics and recd predict use step 4"
    )
    assert Validation(spec(patience=2), validation.curve).stops
    for epoch_steps, overfits in ((3, False), (4, True), (5, False)):
        longer = Validation(spec(), validation.curve, epoch_steps=epoch_steps)
        assert ("overfits after the first epoch" in str(longer)) == overfits
    assert Validation(spec(metric="auc"), validation.curve).curve.values == []
    # The last step of an earlier run is validated whenever it comes, and counts for no patience.
    ended = Validation(spec(patience=2))
    for step, entropy in ((2, 0.8), (4, 0.9), (5, 0.9)):
        ended.add(step, measured(entropy))
    assert not ended.stops
    # A run that went on without validations since, and has them again, is not over.
    later = Validation(spec(patience=2), validation.curve, step=validation.curve.steps[-1] + 1)
    assert not later.stops


def curve(*values: float | None, every: int = 2) -> ValidationCurve:
    steps = [every * (number + 1) for number in range(len(values))]
    return ValidationCurve("normalized_entropy", "min", steps, list(values))


@pytest.mark.parametrize(
    ("every", "known", "step", "taken", "said"),
    [
        (2, curve(0.8, 0.7, 0.9), 6, 4, "; --checkpoint newest would use"),
        (None, curve(0.8, 0.7, 0.9), 9, 9, ""),
        (2, curve(0.8, 0.7, 0.6), 6, 6, ""),
        (1, curve(0.8, 0.9, every=1), 2, 2, ""),
        (None, None, 3, 3, ""),
    ],
)
def test_the_best_checkpoint_of_a_validated_run_is_taken(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    every: int | None,
    known: ValidationCurve | None,
    step: int,
    taken: int,
    said: str,
) -> None:
    validation, checkpoint = every and {"every": every}, {"path": f"{tmp_path}/kept"}
    path = write_validated(tmp_path, validation, checkpoint=checkpoint)
    for each in {4, step} if known and known.best_step == 4 else {step}:
        (kept := tmp_path / "kept" / step_name(each)).mkdir(parents=True)
        (kept / "progress.json").write_text(progress_text(Progress(each, validation=known)))
    registry = load_registry(path)
    assert chosen_checkpoint(registry).name == step_name(taken)
    shown = capsys.readouterr().err
    assert said in shown if said else not shown
    assert chosen_checkpoint(registry, "newest").name == step_name(step)
    assert not capsys.readouterr().err


def write_overfitted(folder: Path, kept: Path, steps: int) -> Path:
    kept.mkdir(exist_ok=True)
    return write_registry(
        folder,
        dataset=random_rows(64, test_rows=50),
        metrics=[{"use": "torchrec.rec_metrics", "options": {"names": ["accuracy"]}}],
        model={"top_mlp": [16]},
        training={
            "batch_size": 8,
            "ranks": 2,
            "epochs": 9,
            "steps": steps,
            "learning_rate": 0.3,
            "validation": {"every": 4, "metric": "accuracy", "mode": "max"},
            "checkpoint": {"path": str(kept), "keep": 1},
        },
    )


def test_test_figures_are_those_of_the_best_step(tmp_path: Path) -> None:
    path = write_overfitted(tmp_path, tmp_path / "kept", 18)
    result = run_on_ranks(run, 2, path)[0]
    found = result["validation"]
    assert found["steps"] == [4, 8, 12, 16, 18]
    best = found["steps"].index(found["best_step"])
    assert best < 4, "it does not overfit"
    assert result["test"]["accuracy"] == pytest.approx(found["values"][best], abs=1e-12)
    again = run_on_ranks(run, 2, path)[0]
    assert again["first_step"] == 18
    assert again["test"] == pytest.approx(result["test"], abs=1e-9)
    assert again["validation"] == found
    longer = run_on_ranks(run, 2, path, ("training.steps=22",))[0]
    path = write_overfitted(tmp_path, tmp_path / "whole", 22)
    assert longer["losses"] == run_on_ranks(run, 2, path)[0]["losses"]


def write_validated(folder: Path, validation: Any, test_rows: int = 4, **training: Any) -> Path:
    dataset = random_rows(8, test_rows=test_rows)
    training |= {"batch_size": 2, "validation": validation}
    return write_registry(folder, dataset=dataset, training=training)


def test_a_validation_needs_a_test_split(tmp_path: Path) -> None:
    path = write_validated(tmp_path, {"every": 2}, test_rows=0)
    with pytest.raises(RegistryError, match=r"split, but dataset 'dlrm\.random' has no test split"):
        check_evaluation(load_registry(path))
