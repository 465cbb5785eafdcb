"""Metrics per value of a column, and baselines, against numpy and scikit-learn."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import torch

from recd_plugin_runs import baseline
from recd_plugin_runs.baseline import base_rate_quality, logistic_regression
from recd_plugin_runs.slices import MOST, _values, slices
from recd_plugins.api import FeatureSchema, Rows

DRAW = np.random.default_rng(3)


def numpy_metrics(logits: Any, labels: Any) -> dict[str, float]:
    """Metrics of the formulas in their papers; AUC by comparing all pairs."""
    scores, rate = 1 / (1 + np.exp(-logits)), labels.mean()
    loss = -np.where(labels == 1, np.log(scores), np.log(1 - scores)).mean()
    entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)
    pairs = logits[labels == 1][:, None] - logits[labels == 0][None]
    return {
        "rows": len(labels),
        "positive_rate": rate,
        "log_loss": loss,
        "normalized_entropy": loss / entropy,
        "auc": ((pairs > 0) + (pairs == 0) / 2).mean(),
        "calibration": scores.mean() / rate,
    }


def check(found: Any, of_slice: list[Any], logits: Any, labels: Any) -> None:
    assert len(found) == len(of_slice)
    for each, rows in zip(found, of_slice, strict=True):
        metrics = {name: value for name, value in each.items() if name != "value"}
        assert metrics == pytest.approx(numpy_metrics(logits[rows], labels[rows]), rel=1e-6)


def rows_with_labels(num_rows: int) -> tuple[Any, Any]:
    logits = DRAW.normal(size=num_rows).round(1)
    return logits, (DRAW.random(num_rows) < 1 / (1 + np.exp(-logits))).astype(float)


def test_frequent_values_have_their_own_metrics() -> None:
    ids = np.repeat(np.arange(25), np.arange(40, 90, 2))  # 24 is the most frequent
    logits, labels = rows_with_labels(len(ids))
    tensors = torch.from_numpy(logits), torch.from_numpy(labels)
    found = slices(pa.array(ids), *tensors, {24: "spring"})
    names = [each["value"] for each in found]
    assert names == ["spring", *map(str, range(23, 4, -1)), "other (5 values)"]
    check(found, [*(ids == n for n in range(24, 4, -1)), ids < 5], logits, labels)

    lists = pa.array([[]] * 300 + [[1, 2]] * (len(ids) - 300), pa.list_(pa.int64()))
    lengths = _values(pa.record_batch({"ids": lists}), "ids")
    by_length = slices(lengths, *tensors)
    assert [each["value"] for each in by_length] == ["0", "2"]
    check(by_length, [slice(300), slice(300, None)], logits, labels)

    single = pa.array([[]] * 300 + [[7]] * 900 + [[8]] * (len(ids) - 1200), pa.list_(pa.int64()))
    by_id = slices(_values(pa.record_batch({"ids": single}), "ids"), *tensors, {7: "ios"})
    rows = {"ios": slice(300, 1200), "8": slice(1200, None), "(missing)": slice(300)}
    order = [each["value"] for each in by_id]
    assert sorted(order) == sorted(rows)
    check(by_id, [rows[name] for name in order], logits, labels)


def test_numbers_are_split_at_their_deciles() -> None:
    numbers = DRAW.gamma(2, 10, 1000)
    logits, labels = rows_with_labels(1000)
    values = pa.array(np.where(np.arange(1000) < 50, np.nan, numbers))
    found = slices(values, torch.from_numpy(logits), torch.from_numpy(labels))
    edges = np.quantile(numbers[50:], np.linspace(0, 1, 11))
    first = numbers[50:][numbers[50:] < edges[1]]
    assert found[0]["value"] == f"{first.min():.6g} to {first.max():.6g}"
    assert found[-1]["value"] == "(missing)"
    places = np.searchsorted(edges[1:-1], numbers, "right")
    places[:50] = 10
    check(found, [places == n for n in range(11)], logits, labels)
    assert len(found) < MOST
    whole = pa.array(np.repeat(np.arange(40.0), 25))
    ranges = [each["value"] for each in slices(whole, torch.from_numpy(logits), torch.ones(1000))]
    assert ranges[:2] + ranges[-1:] == ["0 to 3", "4 to 7", "36 to 39"]


def test_numbers_that_replace_missing_ones_are_a_group() -> None:
    numbers = np.where(np.arange(1000) < 50, 12.0, DRAW.gamma(2, 10, 1000))
    logits, labels = torch.zeros(1000).double(), torch.ones(1000).double()
    labels[:50] = 0
    *ranges, filled = slices(pa.array(numbers), logits, labels, None, 12.0)
    assert (filled["value"], filled["rows"]) == ("12 or missing", 50)
    assert np.isnan(filled["calibration"])
    assert sum(each["rows"] for each in ranges) == 950
    few = slices(pa.array(numbers[:50]), logits[:50], labels[:50], None, 12.0)
    assert [each["value"] for each in few] == ["12 or missing"]


def test_the_base_rate() -> None:
    quality = base_rate_quality(0.3, 10, 4)
    assert quality.log_loss == pytest.approx(-0.4 * np.log(0.3) - 0.6 * np.log(0.7))
    assert quality.calibration == pytest.approx(0.75)
    assert quality.auc == 0.5


@pytest.mark.slow  # scikit-learn takes seconds to import
def test_logistic_regression_is_that_of_one_hot_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    ids, number = DRAW.integers(0, 30, 3000), DRAW.gamma(2, 3, 3000)
    effect = DRAW.normal(size=30)[ids] - np.log1p(number) / 2
    labels = (DRAW.random(3000) < 1 / (1 + np.exp(-effect))).astype(np.int64)
    batch = pa.record_batch({"id": ids, "number": number, "label": labels})
    splits = {"train": batch.slice(0, 2000), "test": batch.slice(2000)}

    class Data:
        def schema(self) -> FeatureSchema:
            return FeatureSchema(("id",), ("number",), "label")

        def reader(self, *, split: str, **others: object) -> range:
            return range(len(splits[split]))

    def split_rows(data: object, split: str) -> list[Rows]:
        whole = splits[split]
        return [Rows(whole.slice(start, 300), ()) for start in range(0, len(whole), 300)]

    monkeypatch.setattr(baseline, "split_rows", split_rows)
    monkeypatch.setattr(baseline, "_STRENGTHS", (0.1,))
    monkeypatch.setattr(baseline, "MOST_ROWS", 1000)  # every second row
    found = logistic_regression(cast(Any, Data()))
    logs = np.log1p(number)
    logs = (logs - logs[:2000:2].mean()) / logs[:2000:2].std()
    inputs = np.concatenate([np.eye(30)[ids], logs[:, None]], axis=1)
    model = linear.LogisticRegression(C=0.1).fit(inputs[:2000:2], labels[:2000:2])
    expected = numpy_metrics(model.decision_function(inputs[2000:]), labels[2000:])
    assert found.log_loss == pytest.approx(expected["log_loss"], rel=1e-3)
    assert found.auc == pytest.approx(expected["auc"], rel=1e-2)
