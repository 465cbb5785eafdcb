"""The profile of a registry's data against counting its ids one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from recd_plugins.access.measure import measure_access
from recd_plugins.errors import DataError
from recd_plugins.interfaces import Rows, Table
from recd_plugins.registry import Registry, load_registry

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: {path}
    sparse: [item_0, usr_0, "seq_0_*"]
    generate: {{rows: 1000, row_group_rows: 300, layout: {layout}}}
converter: {{use: recd.ikjt}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 200}}}}
  - {{use: recd.first_x, features: ["seq_*"], options: {{x: 20}}}}
training: {{batch_size: 64}}
"""

TABLES = [
    Table("t_items", ("item_0", "seq_0_0"), 200, 8, pooled=False),
    Table("t_user", ("usr_0",), 300, 8, pooled=True),
]


def make(folder: Path, layout: str = "clustered") -> Registry:
    path = folder / "registry.yaml"
    path.write_text(REGISTRY.format(path=folder / "table", layout=layout))
    registry = load_registry(path)
    registry.dataset.prepare()
    return registry


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return make(tmp_path_factory.mktemp("measure"))


def counted(registry: Registry, feature: str, rows: int) -> Counter[int]:
    """Ids of the first rows, each list transformed alone."""
    import torch

    from recd_plugins.data.feature_steps import feature_steps

    steps = feature_steps(registry, registry.dataset.schema())[feature]
    counts: Counter[int] = Counter()
    for batch in registry.dataset.scan():
        for row in batch.data.column(feature).to_pylist():
            if not rows:
                return counts
            values = torch.tensor(row if isinstance(row, list) else [row])
            offsets = torch.tensor([0, values.numel()])
            for step in steps:
                values, offsets = step.transform(values, offsets)
            counts.update(values.tolist())
            rows -= 1
    return counts


@pytest.mark.parametrize("rows", [None, 450])
def test_rows_count_as_the_tables_see_them(registry: Registry, rows: int | None) -> None:
    told: list[int] = []
    profile = measure_access(registry, TABLES, rows=rows, progress=told.append)
    samples = rows or 1000
    assert sum(told) == samples
    assert profile.source.startswith("the first 450 rows of" if rows else "1,000 rows of")
    for table in TABLES:
        expected: Counter[int] = Counter()
        for feature in table.features:
            expected += counted(registry, feature, samples)
        access = profile.covering(table.name, table.num_embeddings)
        assert access.samples == samples
        assert access.error == 0
        assert dict(zip(access.rows.tolist(), access.accesses.tolist(), strict=True)) == expected
        assert access.features == table.features


def test_beyond_the_bound_it_is_a_sketch(registry: Registry) -> None:
    exact = measure_access(registry, TABLES).tables["t_items"]
    sketch = measure_access(registry, TABLES, bound=20).tables["t_items"]
    assert len(sketch.rows) <= 20 < len(exact.rows)
    assert 0 < sketch.error < exact.total / 21
    assert sketch.total == exact.total


def test_a_dataset_that_cannot_scan_is_read_as_one_rank(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measure_access(registry, TABLES, rows=960)
    monkeypatch.setattr(registry.dataset, "session_keys", lambda: None)
    monkeypatch.setattr(registry.dataset, "scan", None)
    read = measure_access(registry, TABLES)
    assert read.tables["t_user"].samples == 960  # whole batches of 64
    for name, table in read.tables.items():
        np.testing.assert_array_equal(table.rows, whole.tables[name].rows)
        np.testing.assert_array_equal(table.accesses, whole.tables[name].accesses)


def test_what_is_wrong_is_said(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"looks up feature item_1.*did you mean item_0"):
        measure_access(registry, [Table("t", ("item_1",), 200, 8, pooled=True)])
    with pytest.raises(DataError, match=r"column 'item_0': the id is \d+, and the table has rows"):
        measure_access(registry, [Table("t", ("item_0",), 20, 8, pooled=True)])
    nothing = next(iter(registry.dataset.scan())).data.slice(0, 0)

    def no_rows(split: str) -> Iterator[Rows]:
        return iter([Rows(pa.RecordBatch.from_arrays(nothing.columns, nothing.schema.names), ())])

    monkeypatch.setattr(registry.dataset, "scan", no_rows)
    with pytest.raises(DataError, match="the training split has no rows to profile"):
        measure_access(registry, TABLES)
