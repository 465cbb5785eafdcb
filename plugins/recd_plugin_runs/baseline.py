"""Baselines of ``recd evaluate``: the base rate, and logistic regression of scikit-learn."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from recd_plugin_runs.evaluate import Evaluated
from recd_plugin_runs.slices import split_rows
from recd_plugins.api import (
    DataError,
    Dataset,
    FeatureSchema,
    Quality,
    Rows,
    arrow,
    imports,
    measure_quality,
    measure_tasks,
)

#: Number of training rows for logistic regression, evenly spaced over the training split.
MOST_ROWS = 100_000
_COLUMNS = 1 << 18  # of hashed ids
_SHIFT = np.uint64(46)  # to 18 bits
_STRENGTHS = (0.01, 0.1, 1.0)  # inverse of the L2 penalty
_FACTOR, _OF_FEATURE = np.uint64(0x9E3779B97F4A7C15), 0xC2B2AE3D27D4EB4F  # odd


def with_baselines(found: Evaluated, dataset: Dataset, *, logistic: bool) -> Evaluated:
    """Return an evaluation with the test quality of the base rate and of logistic regression."""
    test, schema = found.test, dataset.schema()
    if not schema.tasks:
        base_rate = _base_rate(dataset.label_mean(), test)
        baselines = {"base_rate": base_rate}
        if logistic:
            baselines["logistic_regression"] = logistic_regression(dataset)
        return replace(found, baselines=baselines)
    binary = [task.name for task in schema.tasks if task.type == "binary"]
    means = dataset.task_means()
    of_tasks = {name: each for name, each in test.tasks.items() if isinstance(each, Quality)}
    rates: dict[str, Any] = {n: _base_rate(means.get(n), of_tasks[n]) for n in binary}
    of = {"base_rate": rates}
    if logistic:
        of["logistic_regression"] = {name: logistic_regression(dataset, name) for name in binary}
    numbers = [task for task in schema.tasks if task.is_regression and task.name in means]
    if numbers:
        parts = [arrow.labels(rows, schema) for rows in split_rows(dataset, "test")]
        labels = torch.cat(parts).double()[:, [schema.tasks.index(task) for task in numbers]]
        predicted = torch.tensor([means[task.name] for task in numbers], dtype=torch.float64)
        rates |= measure_tasks(numbers, predicted.expand_as(labels), labels).tasks
    size = test.num_samples
    return replace(
        found,
        baselines={
            name: Quality(math.nan, math.nan, size, tasks=each) for name, each in of.items() if each
        },
    )


def _base_rate(mean: float | None, test: Quality) -> Quality:
    """Return the test quality of the mean training label; None uses the mean of the test split."""
    size = test.num_samples
    positives = round(sum(rows * mean_label for rows, _, mean_label in test.bins))
    return base_rate_quality(positives / max(1, size) if mean is None else mean, size, positives)


def base_rate_quality(mean: float, num_samples: int, num_positives: int) -> Quality:
    """Return the quality of predicting ``mean`` for every row of a split."""
    logit = math.log(mean) - math.log1p(-mean) if 0 < mean < 1 else math.copysign(50, mean - 0.5)
    labels = (torch.arange(num_samples) < num_positives).double()
    return measure_quality(torch.full_like(labels, logit), labels)


def logistic_regression(dataset: Dataset, label: str | None = None) -> Quality:
    """Return the test quality of a logistic regression for one label of ``dataset``.

    Rows without the label are left out. Ids are one-hot encoded by hash, and numbers are scaled to
    unit variance. The L2 penalty is the best of three on the last tenth of the training rows.

    Raises:
        SetupError: scikit-learn is not installed.
        DataError: the training rows have only one label.
    """
    linear = imports.optional_library("sklearn.linear_model", "baseline", "--baseline")
    schema = dataset.schema()
    label = label or schema.label
    size = len(dataset.reader(rank=0, world_size=1, batch_size=1, split="train"))
    every = -(-size // MOST_ROWS)
    ids, numbers, labels = _train_rows(dataset, schema, label, every)
    if len(np.unique(labels)) < 2:
        raise DataError("--baseline: all training labels are equal. Remove --baseline.")
    mean, scale = numbers.mean(0), numbers.std(0) + 1e-12
    inputs = _inputs(ids, (numbers - mean) / scale)

    def fitted(strength: float, last: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # at most 50 iterations, to save time
            return linear.LogisticRegression(C=strength, max_iter=50).fit(
                inputs[:last], labels[:last]
            )

    def held_out_entropy(strength: float) -> float:
        logits = fitted(strength, first).decision_function(inputs[first:])
        return float(np.logaddexp(0, np.where(labels[first:] > 0, -logits, logits)).mean())

    first = len(labels) * 9 // 10
    has_both = len(np.unique(labels[:first])) == 2 and first < len(labels)
    best = min(_STRENGTHS, key=held_out_entropy) if has_both else _STRENGTHS[0]
    model, logits, labels_of_test = fitted(best, len(labels)), [], []
    for rows in split_rows(dataset, "test"):
        ids, numbers, own = _encoded(rows, schema, label)
        logits.append(model.decision_function(_inputs(ids, (numbers - mean) / scale)))
        labels_of_test.append(own)
    return measure_quality(
        torch.from_numpy(np.concatenate(logits)), torch.from_numpy(np.concatenate(labels_of_test))
    )


def _train_rows(
    dataset: Dataset, schema: FeatureSchema, label: str, every: int
) -> tuple[Any, Any, Any]:
    """Return the encoded form of every ``every``-th row of the training split."""
    from scipy import sparse

    parts, start = [], 0
    for rows in split_rows(dataset, "train"):
        taken = np.arange(-start % every, len(rows), every)
        start += len(rows)
        if len(taken):
            parts.append(_encoded(Rows(rows.data.take(pa.array(taken)), ()), schema, label))
    ids, numbers, labels = zip(*parts, strict=True)
    return sparse.vstack(ids, format="csr"), np.concatenate(numbers), np.concatenate(labels)


def _encoded(rows: Rows, schema: FeatureSchema, label: str) -> tuple[Any, Any, Any]:
    """Return hashed ids (sparse matrix), numbers on a log scale, and labels of some rows."""
    from scipy import sparse

    if schema.tasks:
        known = pc.is_finite(rows.data.column(label))
        rows = Rows(rows.data.filter(known), ())

    places, columns, weights = [], [], []
    for number, name in enumerate(schema.sparse, 1):
        ids, offsets = arrow.sparse_column(rows, name)
        lengths = np.diff(offsets)
        used = ids[offsets[0] : offsets[-1]].astype(np.uint64)
        columns.append((used * _FACTOR + np.uint64(number * _OF_FEATURE % 2**64)) >> _SHIFT)
        places.append(np.repeat(np.arange(len(rows)), lengths))
        weights.append(np.repeat(1 / np.sqrt(np.maximum(lengths, 1)), lengths))
    numbers = arrow.dense_features(rows, schema.dense).double().nan_to_num().numpy()
    entries = [np.concatenate([*each, np.zeros(0)]) for each in (weights, places, columns)]
    return (
        sparse.csr_matrix((entries[0], (entries[1], entries[2])), shape=(len(rows), _COLUMNS)),
        np.sign(numbers) * np.log1p(np.abs(numbers)),
        arrow.labels(rows, label).double().numpy(),
    )


def _inputs(ids: Any, numbers: Any) -> Any:
    from scipy import sparse

    return sparse.hstack([ids, sparse.csr_matrix(numbers)], format="csr")
