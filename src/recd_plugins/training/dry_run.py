"""Implements ``recd run --dry-run``, which describes a run without training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from rich.table import Table as RichTable

from recd_plugins.config import RunConfig
from recd_plugins.config.run_config import feature_steps
from recd_plugins.data.prepared import wrapped_dataset
from recd_plugins.interfaces import Dataset, Split, Table
from recd_plugins.interfaces.model_tables import tables_of
from recd_plugins.model.build import build_model
from recd_plugins.report.tables import text_table
from recd_plugins.runtime.text import bytes_text, shortened
from recd_plugins.training.evaluation import splits_of

_LINES = 12


class Column(NamedTuple):
    """A data column, the model input that it feeds (None if unused), and an explanation."""

    name: str
    feeds: str | None
    how: str


def dry_run(registry: RunConfig, world_size: int) -> tuple[dict[str, Any], RichTable]:
    """Return columns, rows, steps and model size of a run, as JSON values and as a table.

    The dataset must already be prepared (downloaded or generated).
    """
    training = registry.training
    schema = registry.dataset.schema()
    with torch.random.fork_rng([]), torch.device("meta"):
        model = build_model(registry, schema)
    tables = tables_of(model)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    of_tables = sum(4 * table.num_embeddings * table.embedding_dim for table in tables)
    # Evaluation reads rows that do not fill a batch on every rank one by one.
    each_row = (registry.dataset, 1, 1)
    whole: dict[Split, tuple[Dataset, int, int]] = dict.fromkeys(splits_of(registry), each_row)
    whole["train"] = wrapped_dataset(registry), world_size, training.batch_size
    batches = {
        split: len(data.reader(rank=0, world_size=ranks, batch_size=rows, split=split))
        for split, (data, ranks, rows) in whole.items()
    }
    columns = [*_columns(registry, tables)]
    steps = batches["train"] * training.epochs
    found: dict[str, Any] = {
        "columns": [column._asdict() for column in columns],
        "rows": {split: n * whole[split][1] * whole[split][2] for split, n in batches.items()},
        "steps": steps if training.steps is None else min(steps, training.steps),
        "table_bytes": of_tables,
        "layer_bytes": num_bytes - of_tables,
    }
    rows = ", ".join(f"{count:,} rows of {split}" for split, count in found["rows"].items())
    read = f"{rows}; {found['steps']:,} steps"
    if registry.dataset.is_stream:
        found["rows"], found["steps"] = {}, training.steps
        read = "a stream" if training.steps is None else f"a stream; {training.steps:,} steps"
    table = text_table(
        "data columns and their use",
        Column._fields,
        caption=f"{read}; size of the tables {bytes_text(of_tables)}, "
        f"of the dense layers {bytes_text(num_bytes - of_tables)}",
    )
    alike: dict[tuple[str, str], list[str]] = {}
    for each in columns:
        is_long = len(columns) > _LINES  # then tables of different sizes share a line
        how = re.sub(r"[\d,]+ (?=rows of)", "", each.how) if is_long else each.how
        alike.setdefault((each.feeds or "-", how), []).append(each.name)
    for (feeds, how), names in alike.items():
        several = f"{names[0]} ... {names[-1]} ({len(names)})"
        table.add_row(several if len(names) > 2 else ", ".join(names), feeds, how)
    return found, table


def unused_line(registry: RunConfig) -> str:
    """Return a line that lists the unused data columns; "" if all are used."""
    left_out = registry.dataset.left_out()
    if not left_out:
        return ""
    named = shortened([f"{name} ({why})" for name, why in left_out.items()], str)
    return f"columns that the run does not use: {named}"


def user_line(registry: RunConfig) -> str:
    """Return a line that lists the user features of the fitted converter; "" without any."""
    names = registry.converter.user_features
    found = shortened(names, str)
    return f"user features, equal for all rows of a request: {found}" if names else ""


def _columns(registry: RunConfig, tables: Iterable[Table]) -> Iterator[Column]:
    dataset = registry.dataset
    schema = dataset.schema()
    by_feature = {feature: table for table in tables for feature in table.features}
    steps = feature_steps(registry, schema)
    for feature in schema.sparse:
        names = [step.name for step in steps.get(feature, ())]
        table = by_feature.get(feature)
        if table is None:
            yield Column(feature, None, "the model has no table for this feature")
            continue
        size = f"{table.num_embeddings:,} rows of {table.embedding_dim}"
        named = size if table.name == f"t_{feature}" else f"{table.name}, {size}"
        poolings = [each.plugin.name for each in registry.pooling if each.matches(feature)]
        pooled = poolings[:1] or (["pooled in bags"] if table.pooled else ["a sequence"])
        yield Column(feature, "sparse", ", ".join([*names, named, *pooled]))
    for feature in schema.dense:
        yield Column(feature, "dense", ", ".join(step.name for step in steps.get(feature, ())))
    for name in schema.labels:
        yield Column(name, "label", "")
    if (keys := dataset.session_keys()) is not None:
        yield Column(keys.session, "sessions", "not a model input")
        yield Column(keys.timestamp, "order of a session", "not a model input")
    for name, why in dataset.left_out().items():
        yield Column(name, None, why)
