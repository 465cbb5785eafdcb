from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fuzz import tables
from tests.small_registry import hashed, papercal, write_registry

from recd_plugins import RunConfig, load_registry
from recd_plugins.config.run_config import feature_steps
from recd_plugins.data.access import measure_access, positive_counts
from recd_plugins.data.row_pipeline import RowPipeline, lower
from recd_plugins.interfaces import Table
from recd_plugins.interfaces.batch import Placement

TABLES = [
    Table("t_items", ("item_0", "seq_0_0"), 200, 8, pooled=False),
    Table("t_user", ("usr_0",), 300, 8, pooled=True),
]


def make(folder: Path, name: str = "registry.yaml", **converter: Any) -> RunConfig:
    sparse = ["item_0", "usr_0", "seq_0_*"]
    first = {"use": "recd.first_x", "features": ["seq_*"], "options": {"x": 20}}
    path = write_registry(
        folder,
        name,
        dataset=papercal(folder, 1000, 300, sparse=sparse),
        converter=converter or {"use": "recd.ikjt"},
        preprocessing=[*hashed(200), first],
        training={"batch_size": 64},
    )
    return load_registry(path)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    registry = make(tmp_path_factory.mktemp("measure"))
    registry.dataset.prepare()
    return registry


def counted(registry: RunConfig, feature: str, rows: int) -> Counter[int]:
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
def test_rows_count_as_the_tables_see_them(registry: RunConfig, rows: int | None) -> None:
    told: list[int] = []
    profile = measure_access(registry, TABLES, rows=rows, deduplicated=False, progress=told.append)
    samples = rows or 1000
    assert sum(told) == samples
    assert profile.source.startswith("the first 450 rows of" if rows else "1,000 rows of")
    for table in TABLES:
        expected: Counter[int] = Counter()
        for feature in table.features:
            expected += counted(registry, feature, samples)
        access = profile.covering(table.name, table.num_embeddings)
        assert access.samples == samples
        assert (access.error, access.dedupe_factor, access.batch_size) == (0, 1, None)
        assert dict(zip(access.rows.tolist(), access.accesses.tolist(), strict=True)) == expected
        assert access.features == table.features


CONVERTERS: dict[str, dict[str, Any]] = {
    "exact": {"use": "recd.ikjt"},
    "one group": {"use": "recd.ikjt", "options": {"groups": [["seq_0_0", "seq_0_1"]]}},
    "partial": {"use": "recd.partial_ikjt"},
}


@pytest.mark.parametrize(
    ("converter", "pooled", "rows"),
    [
        ("exact", False, None),
        ("exact", True, 130),
        ("one group", True, None),
        ("partial", False, 130),
        ("partial", True, None),
    ],
)
def test_what_is_sent(registry: RunConfig, converter: str, pooled: bool, rows: int | None) -> None:
    registry = make(registry.path.parent, "other.yaml", **CONVERTERS[converter])
    tables = [
        Table("t_items", ("item_0", "seq_0_0"), 200, 8, pooled=pooled),
        Table("t_more", ("seq_0_1",), 200, 8, pooled=pooled),
    ]
    profile = measure_access(registry, tables, rows=rows)

    # What the model would be given, batch by batch.
    names = ("item_0", "seq_0_0", "seq_0_1")
    placement = Placement(pooled=names) if pooled else Placement(sequence=names)
    pipeline = RowPipeline(registry)
    sent: dict[str, Counter[int]] = {name: Counter() for name in names}
    reader = registry.dataset.reader(rank=0, world_size=1, batch_size=64, split="train")
    for batch in islice(reader, 3 if rows else None):
        given = lower(pipeline.batch(batch), placement)
        kjt = given.sparse_features if pooled else given.sequence_features
        for name, ids in zip(kjt.keys(), kjt.values().split(kjt.length_per_key()), strict=True):
            sent[name].update(ids.tolist())

    samples = 192 if rows else 960  # whole batches of 64
    stored = measure_access(registry, tables, rows=samples, deduplicated=False)
    for table in tables:
        access, every_row = profile.tables[table.name], stored.tables[table.name]
        expected: Counter[int] = Counter()
        for name in table.features:
            expected += sent[name]
        assert dict(zip(access.rows.tolist(), access.accesses.tolist(), strict=True)) == expected
        assert (access.samples, access.batch_size, access.error) == (samples, 64, 0)
        assert access.dedupe_factor == every_row.total / expected.total() > 1
        # L is that of all rows, and p over the factor what is sent for a sample.
        assert access.length == pytest.approx(every_row.length, rel=1e-12)
        p = access.probabilities()
        assert p.sum() == pytest.approx(every_row.length, rel=1e-12)
        np.testing.assert_allclose(p / access.dedupe_factor, access.accesses / samples, rtol=1e-12)


def test_models_that_are_made_on_the_meta_device_are_told_the_same(cwd: Path) -> None:
    """`recd run` makes one there to learn its size, before any other."""
    tables.write_two()
    Path("registry.yaml").write_text(tables.registry(), encoding="utf-8")
    registry = load_registry("registry.yaml")
    with torch.device("meta"):
        counts = positive_counts(registry, "user", tables.NUM_IDS)
    positive = [row["user"] for row in tables.rows() if row["label"]]
    assert counts.sum() == len(positive)
    assert sorted(counts[counts > 0]) == sorted(Counter(map(tuple, positive)).values())
