"""Metrics of a trained model per value of a column, for ``recd evaluate --by``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from recd_plugin_runs.predict import scanned, score_turns, turns
from recd_plugins.api import (
    DataError,
    Dataset,
    Rows,
    Split,
    doing,
    list_dict,
    measure_quality,
    measure_tasks,
    row_pipelines,
    row_tables,
    tasks,
    text_utils,
    trained_models,
)

#: Number of values with metrics of their own. Other values are combined.
MOST = 20
_BINS = 10
_MISSING = "(missing)"


def columns_of(dataset: Dataset, name: str) -> list[str]:
    """Return the stored columns of the key column or feature ``name``, or of both.

    Raises DataError for other names.
    """
    schema = dataset.schema()
    columns: dict[str, list[str]] = {}
    if _has_scan(dataset):
        for column, shown in dataset.keys().items():
            columns.setdefault(shown, []).append(column)
    for feature in (*schema.sparse, *schema.dense):
        columns.setdefault(feature, []).append(feature)
    if name not in columns:
        meant = text_utils.did_you_mean(name, columns) or "."
        why = dataset.left_out().get(name, "is neither a feature nor a key column")
        raise DataError(
            f"--by {name}: column {name!r} {why}{meant} Use one of these columns: "
            f"{', '.join(map(repr, columns))}. For another column of a table, set its role to "
            "'key' and train again."
        )
    return columns[name]


def split_rows(dataset: Dataset, split: Split) -> Iterator[Rows]:
    """Yield every row of a split once, in stored order, without dataset wrappers."""
    if _has_scan(dataset):
        return scanned(dataset, split)
    return row_tables.rows_of_split(dataset, split)


def _has_scan(dataset: Dataset) -> bool:
    return type(dataset).scan is not Dataset.scan


def measure_slices(
    trained: trained_models.Trained, names: Sequence[str], rank: int, world_size: int
) -> dict[str, list[dict[str, Any]]]:
    """Score the test split and return the result of ``slices``, keyed by column of ``names``.

    Collective: call on all ranks. Only rank 0 gets a result, other ranks get {}.
    """
    registry = replace(trained.registry, wrappers=())
    dataset, size = registry.dataset, registry.training.batch_size
    columns = {name: columns_of(dataset, name) for name in names}
    schema = dataset.schema()
    read = tuple(dict.fromkeys([*schema.labels, *chain(*columns.values())]))
    pipeline = row_pipelines.RowPipeline.of_model(registry, trained.parts.prepared)
    dealt = turns(split_rows(dataset, "test"), read, rank, world_size, size)
    kept, logits = list[pa.RecordBatch](), list[Tensor]()
    with torch.no_grad(), doing("scoring", long=True):
        for turn, of_turn in score_turns(trained, pipeline, dealt, world_size):
            kept += turn.keys
            logits += [of_turn] * (rank == 0)
    if not kept:
        return {}
    batch = pa.Table.from_batches(kept).combine_chunks().to_batches()[0]
    of_labels = (batch.column(name).to_numpy(zero_copy_only=False) for name in schema.labels)
    labels = torch.from_numpy(np.stack([*of_labels], axis=1)).double()
    labels = labels if schema.tasks else labels.squeeze(1)
    found = {}
    for name, choices in columns.items():
        # A key column has the original texts, but an original time is less useful than its hour.
        texts_first = (each for each in choices if _is_text(batch.schema.field(each).type))
        column = next(texts_first, choices[-1])
        texts = dataset.texts(column)
        fill = _fill(dataset, column)
        values, scores = _values(batch, column), torch.cat(logits)
        found[name] = slices(values, scores, labels, texts, fill, schema.tasks)
    return found


def _fill(dataset: Dataset, column: str) -> float:
    """Return the number that replaced missing numbers of a feature; NaN without one."""
    encodings = getattr(dataset, "encodings", None)
    rules: list[dict[str, Any]] = encodings() if encodings is not None else []
    rule = next((one for one in rules if one["feature"] == column), dict[str, Any]())
    missing = rule.get("missing") if rule.get("kind") == "number" else None
    return float(np.float32(missing)) if isinstance(missing, float | int) else math.nan


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _values(batch: pa.RecordBatch, column: str) -> pa.Array:
    """Return a column. Replaces lists by their id or null; by lengths if a list has several ids."""
    field, values = batch.schema.field(column), batch.column(column)
    if list_dict.is_list_dict(field):
        values = list_dict.to_lists(values)
    if not (pa.types.is_list(values.type) or pa.types.is_large_list(values.type)):
        return values
    lengths = pc.list_value_length(values).fill_null(0)
    if pc.max(lengths).as_py() > 1:
        return lengths.cast(pa.float64())
    has_id = lengths.to_numpy(zero_copy_only=False) > 0
    return values.flatten().take(pa.array(np.cumsum(has_id) - 1, mask=~has_id))


def slices(
    values: pa.Array,
    logits: Tensor,
    labels: Tensor,
    texts: Mapping[int, str] | None = None,
    fill: float = math.nan,
    of: Sequence[tasks.Task] = (),
) -> list[dict[str, Any]]:
    """Return metrics of the rows with each of the most frequent values, and of all other rows.

    Frequent values come first. Floating-point values are ascending, and are split at deciles if
    there are more than ``MOST`` distinct values.

    Args:
        values: value of each row, ``[N]``.
        logits: logit of each row, float64 ``[N]``, or ``[N, T]`` of T tasks.
        labels: 0 or 1 for each row, float64 ``[N]``; with tasks ``[N, T]``, NaN if missing.
        texts: text of values that are text ids.
        fill: number that replaced missing numbers. Rows with this number are a group of their own.
        of: the tasks, if there are several labels.

    Returns:
        A list of dicts with ``value``, ``rows``, ``positive_rate`` (the mean label; not with tasks)
        and metrics.
    """
    group, shown = _grouped(values, texts or {}, fill)
    found = []
    for number, value in enumerate(shown):
        rows = torch.from_numpy(np.flatnonzero(group == number))
        if of:
            measured = measure_tasks(of, logits[rows], labels[rows])
            counts = {f"{n}.num_samples": each.num_samples for n, each in measured.tasks.items()}
            figures = {**measured.figures(), **counts}
            found.append({"value": value, "rows": figures.pop("num_samples"), **figures})
            continue
        quality = measure_quality(logits[rows], labels[rows]).figures()
        rate = float(labels[rows].mean())
        if not rate:
            quality["calibration"] = math.nan
        of_slice = {"rows": quality.pop("num_samples"), "positive_rate": rate}
        found.append({"value": value, **of_slice, **quality})
    return found


def _grouped(
    values: pa.Array, texts: Mapping[int, str], fill: float
) -> tuple[NDArray[np.int64], list[str]]:
    """Group rows by value. Return the group number of each row, ``[N]``, and the group names."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_floating(values.type):
        values = values.fill_null(np.nan)
        if len(values.unique()) > MOST:
            numbers = values.to_numpy(zero_copy_only=False)
            is_filled = numbers == fill
            group, shown = _deciles(np.where(is_filled, np.nan, numbers))
            if is_filled.any():
                shown[-1] = f"{fill:.6g} or missing"
            return group, shown
    coded = values.dictionary_encode(null_encoding="encode")
    codes = coded.indices.to_numpy(zero_copy_only=False)
    if pa.types.is_floating(values.type):
        order = np.argsort(coded.dictionary.to_numpy(zero_copy_only=False))
    else:
        order = np.argsort(-np.bincount(codes), kind="stable")
    place = np.argsort(order)  # of each distinct value
    names = coded.dictionary.take(pa.array(order[:MOST])).to_pylist()
    shown = [_shown(name, texts) + " or missing" * (name == fill) for name in names]
    if (others := len(order) - MOST) > 0:
        shown.append(f"other ({others:,} values)")
    return np.minimum(place[codes], MOST), shown


def _shown(value: Any, texts: Mapping[int, str]) -> str:
    if isinstance(value, float):
        return _MISSING if math.isnan(value) else f"{value:.6g}"
    return _MISSING if value is None else str(texts.get(value, value))


def _deciles(numbers: NDArray[Any]) -> tuple[NDArray[np.int64], list[str]]:
    """Group numbers by decile. Return the group number of each, ``[N]``, and the group names."""
    missing = np.isnan(numbers)
    edges = np.unique(np.quantile(numbers[~missing], np.linspace(0, 1, _BINS + 1)))
    place = np.clip(np.searchsorted(edges, numbers, "right") - 1, 0, len(edges) - 2)
    place[missing] = len(edges) - 1
    used, group = np.unique(place, return_inverse=True)  # no row may be missing
    shown = []
    for number in range(len(used)):
        ends = {f"{end(numbers[group == number]):.6g}": None for end in (np.min, np.max)}
        shown.append(_MISSING if used[number] == len(edges) - 1 else " to ".join(ends))
    return group, shown
