"""``recd run --dry-run``: what a run would do up to its first step, and lines said at a start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table as RichTable

from recd_plugins.config import RunConfig
from recd_plugins.data.arrow import dense_features
from recd_plugins.data.prepared import wrapped_dataset
from recd_plugins.data.preprocess import feature_steps
from recd_plugins.data.rows import training_rows
from recd_plugins.interfaces import Dataset, Split, Table
from recd_plugins.interfaces.data_profile import DataProfile, least_ids_saved
from recd_plugins.interfaces.model_tables import tables_of
from recd_plugins.model.build import build_model
from recd_plugins.runtime.text import bytes_text, shortened
from recd_plugins.training.evaluation import splits_of


@dataclass(frozen=True)
class Column:
    """A column of the data, what it feeds, and how, or why nothing."""

    name: str
    feeds: str | None
    how: str


@dataclass(frozen=True)
class DryRun:
    """A run before its first step."""

    columns: tuple[Column, ...]
    rows: dict[str, int]
    steps: int
    table_bytes: int
    layer_bytes: int

    @classmethod
    def of(cls, registry: RunConfig, world_size: int) -> DryRun:
        """Return the dry run of a registry whose data is prepared."""
        training = registry.training
        schema = registry.dataset.schema()
        with torch.random.fork_rng([]), torch.device("meta"):
            model = build_model(registry, schema)
        tables = tables_of(model)
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        of_tables = sum(4 * table.num_embeddings * table.embedding_dim for table in tables)
        # Evaluation reads every row, one by one where they fill no batch on every rank.
        each_row = (registry.dataset, 1, 1)
        whole: dict[Split, tuple[Dataset, int, int]] = dict.fromkeys(splits_of(registry), each_row)
        whole["train"] = wrapped_dataset(registry), world_size, training.batch_size
        batches = {
            split: len(data.reader(rank=0, world_size=ranks, batch_size=rows, split=split))
            for split, (data, ranks, rows) in whole.items()
        }
        steps = batches["train"] * training.epochs
        return cls(
            tuple(_columns(registry, tables)),
            {split: n * whole[split][1] * whole[split][2] for split, n in batches.items()},
            steps if training.steps is None else min(steps, training.steps),
            of_tables,
            num_bytes - of_tables,
        )

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "columns": [vars(column) for column in self.columns],
            "rows": self.rows,
            "steps": self.steps,
            "table_bytes": self.table_bytes,
            "layer_bytes": self.layer_bytes,
        }

    def table(self) -> RichTable:
        """Show the columns, and the rest in the caption."""
        rows = ", ".join(f"{count:,} rows of {split}" for split, count in self.rows.items())
        table = RichTable(
            title="columns of the data, and what they are for",
            caption=f"{rows}; {self.steps:,} steps; the model's tables "
            f"take {bytes_text(self.table_bytes)}, its layers {bytes_text(self.layer_bytes)}",
        )
        for heading in ("column", "feeds", "how"):
            table.add_column(heading, overflow="fold")
        for (feeds, how), alike in groupby(self.columns, lambda each: (each.feeds, each.how)):
            names = [each.name for each in alike]
            shown = (
                f"{names[0]} ... {names[-1]} ({len(names)})" if len(names) > 2 else ", ".join(names)
            )
            table.add_row(shown, feeds or "-", how)
        return table


#: Rows in which distinct values are counted, and the share of them that float32 has to keep.
_ROWS_ROUNDED, _MERGED = 65_536, 0.9


def unused_line(registry: RunConfig) -> str:
    """Name columns that feed nothing; empty if none or unknown."""
    left_out = registry.dataset.left_out()
    if not left_out:
        return ""
    named = shortened([f"{name} ({why})" for name, why in left_out.items()])
    return f"columns that feed nothing: {named}"


def rounded_line(registry: RunConfig) -> str:
    """Name dense columns without preprocessing whose values float32 merges; empty if none."""
    schema = registry.dataset.schema()
    steps = feature_steps(registry, schema)
    plain = [name for name in schema.dense if not steps.get(name)]
    seen: dict[str, list[NDArray[np.float64]]] = {}
    for rows in training_rows(registry, _ROWS_ROUNDED) if plain else ():
        for name in plain:
            numbers = dense_features(rows, (name,))
            if numbers.dtype == torch.float64:
                seen.setdefault(name, []).append(numbers[:, 0].numpy())
        if not seen:
            break
    merged = []
    for name, parts in seen.items():
        values = np.unique(np.concatenate(parts))
        kept = len(np.unique(values.astype(np.float32)))
        if kept < _MERGED * len(values):
            merged.append(f"{name} ({kept:,} of {len(values):,} values stay distinct)")
    if not merged:
        return ""
    return (
        f"float32 rounds different values to the same number in {shortened(merged)}: centre such a "
        "column by a preprocessing entry"
    )


def converter_line(registry: RunConfig, profile: DataProfile, ranks: int) -> str:
    """Advise against deduplication that saves too few ids on one rank; empty if it pays."""
    factors = registry.converter.dedupe_factors()
    plain = registry.converter.plain
    if ranks > 1 or not factors or not plain:
        return ""
    pooled = registry.claim("pooling", registry.dataset.schema().sparse)
    saved = {name: profile.of(name).length * (1 - 1 / of) for name, of in factors.items()}
    if any(ids >= least_ids_saved(sequence=name in pooled) for name, ids in saved.items()):
        return ""
    return (
        f"{registry.converter.name} saves at most {max(saved.values()):.1f} ids per row in any "
        f"feature; on one rank `converter: {{use: {plain}}}` is faster"
    )


def rest_line(registry: RunConfig, steps: int, rows_of_step: int) -> str:
    """Say how many rows an epoch leaves out; empty if none or unknown."""
    # A wrapper hands out other rows than are stored.
    statistics = None if registry.wrappers else registry.dataset.statistics()
    if statistics is None or not 0 < statistics.rows - steps * rows_of_step < rows_of_step:
        return ""
    rest = statistics.rows - steps * rows_of_step
    return (
        f"{rest:,} of {statistics.rows:,} training rows fill no batch on every rank: an epoch "
        "leaves them out"
    )


def _columns(registry: RunConfig, tables: Iterable[Table]) -> Iterator[Column]:
    dataset = registry.dataset
    schema = dataset.schema()
    by_feature = {feature: table for table in tables for feature in table.features}
    steps = feature_steps(registry, schema)
    for feature in schema.sparse:
        names = [step.name for step in steps.get(feature, ())]
        table = by_feature.get(feature)
        if table is None:
            yield Column(feature, None, "the model has no table for it")
            continue
        size = f"{table.num_embeddings:,} rows of {table.embedding_dim}"
        named = size if table.name == f"t_{feature}" else f"{table.name}, {size}"
        poolings = [each.plugin.name for each in registry.pooling if each.matches(feature)]
        pooled = poolings[:1] or (["pooled in bags"] if table.pooled else ["a sequence"])
        yield Column(feature, "sparse", ", ".join([*names, named, *pooled]))
    for feature in schema.dense:
        names = [step.name for step in steps.get(feature, ())]
        yield Column(feature, "dense", ", ".join(names))
    yield Column(schema.label, "label", "")
    if (keys := dataset.session_keys()) is not None:
        yield Column(keys.session, "sessions", "no input of the model")
        yield Column(keys.timestamp, "their order", "no input of the model")
    for name, why in dataset.left_out().items():
        yield Column(name, None, why)
