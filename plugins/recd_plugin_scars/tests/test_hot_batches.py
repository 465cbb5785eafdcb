"""Wrapper ``scars.hot_batches``: the contract of datasets, and what a model's caches make hot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugin_scars.cache import CacheStrategy
from recd_plugin_scars.hot_batches import HotBatches
from recd_plugin_scars.runtime.policies import TableCache
from recd_plugins.data.arrow import sparse_column
from recd_plugins.interfaces import (
    Dataset,
    FeatureLookups,
    Lookups,
    Reader,
    Rows,
    Split,
    Table,
    TableStrategy,
)
from recd_plugins.runtime.errors import DataError, SetupError
from recd_plugins.testing.contracts import DatasetContract

ROWS, IDS = 251, 40


@dataclass
class Known(Lookups):
    tables: Sequence[Table] = ()
    caches: Mapping[str, TableCache] = field(default_factory=dict)

    @property
    def parts(self) -> Sequence[TableStrategy]:
        return [CacheStrategy(self.caches)] if self.caches else []

    def of(self, rows: Rows, features: Sequence[str]) -> Mapping[str, FeatureLookups]:
        found = {}
        for name in features:
            ids, offsets = sparse_column(rows, name)
            found[name] = FeatureLookups(ids[offsets[0] : offsets[-1]], offsets - offsets[0], None)
        return found


def write_table(path: Path) -> None:
    """Sessions of 1 to 6 rows whose ids are 0 to 39, small ones most."""
    random = np.random.default_rng(3)
    sessions = np.repeat(np.arange(ROWS), random.integers(1, 7, ROWS))[:ROWS]
    table = pa.table(
        {
            "session_id": sessions,
            "ts": np.arange(ROWS),
            "label": np.arange(ROWS) % 2,
            "price": np.arange(ROWS, dtype=np.float32),
            "item": (random.zipf(1.5, ROWS) - 1) % IDS,
            "seen": pa.array([(random.zipf(1.5, n % 3) - 1) % IDS for n in range(ROWS)]),
        }
    )
    pq.write_table(table, path, row_group_size=30)


def parquet(folder: Path) -> SessionParquet:
    if not (folder / "rows.parquet").exists():
        write_table(folder / "rows.parquet")
    options = {"path": folder / "rows.parquet", "sparse": ["item", "seen"], "shuffle": True}
    return SessionParquet(SessionParquet.Options.model_validate(options))


def hot_batches(
    inner: Dataset, options: Mapping[str, object], lookups: Lookups | None = None
) -> HotBatches:
    made = HotBatches(HotBatches.Options.model_validate(options))
    return made.over(inner, lookups or Known())


def sorted_by_caches(folder: Path, num_hot: int = 12, **options: object) -> HotBatches:
    caches = {table.name: cached(range(num_hot)) for table in (ITEM, SEEN)}
    return hot_batches(parquet(folder), {"window": 18, **options}, Known([ITEM, SEEN], caches))


class Contract(DatasetContract):
    def rows_left_out(self, world_size: int, batch_size: int) -> int:
        return 2 * world_size * batch_size - 1


class TestSamples(Contract):
    @pytest.fixture
    def plugin(self, tmp_path: Path) -> HotBatches:
        return sorted_by_caches(tmp_path)


class TestSessions(Contract):
    @pytest.fixture
    def plugin(self, tmp_path: Path) -> HotBatches:
        return sorted_by_caches(tmp_path, sessions=True)


def reader(dataset: Dataset, split: Split = "train") -> Reader:
    return dataset.reader(rank=0, world_size=1, batch_size=4, split=split)


def read(dataset: Dataset) -> list[Rows]:
    return list(reader(dataset))


def is_hot(rows: Rows, limits: Mapping[str, int]) -> list[bool]:
    return [
        all(i < limit for name, limit in limits.items() for i in np.atleast_1d(row[name]))
        for row in rows.data.to_pylist()
    ]


def cached(rows: Sequence[int], policy: str = "static", num_embeddings: int = IDS) -> TableCache:
    share = len(rows) / num_embeddings
    return TableCache(policy, share, np.array(rows, np.int64))  # type: ignore[arg-type]


ITEM = Table("t_item", ("item",), IDS, 8, pooled=True)
SEEN = Table("t_seen", ("seen",), IDS, 8, pooled=True)


def test_hot_batches_hold_hot_samples_alone(tmp_path: Path) -> None:
    found = read(sorted_by_caches(tmp_path))
    num_hot = [sum(is_hot(rows, {"item": 12, "seen": 12})) for rows in found]
    pure = [count for count in num_hot if count in (0, 4)]
    assert set(pure) == {0, 4}
    assert len(found) - len(pure) <= -(-len(found) // 5), "windows are 5 batches"


def test_only_tables_with_a_cache_count(tmp_path: Path) -> None:
    lookups = Known([ITEM, SEEN], {"t_item": cached([0, 2, 1])})
    found = read(hot_batches(parquet(tmp_path), {"window": 100}, lookups))
    num_hot = [sum(is_hot(rows, {"item": 3})) for rows in found]
    assert 4 in num_hot
    assert sum(count not in (0, 4) for count in num_hot) <= 2, "one mixed batch per window"


def test_a_static_cache_of_all_rows_makes_every_sample_hot(tmp_path: Path) -> None:
    lookups = Known([ITEM], {"t_item": cached(range(IDS))})
    inner = parquet(tmp_path)
    sorted_rows = read(hot_batches(inner, {}, lookups))
    assert [rows.data for rows in sorted_rows] == [rows.data for rows in read(inner)]


def test_the_test_split_is_left_as_it_is(tmp_path: Path) -> None:
    path = parquet(tmp_path).options.path
    inner = SessionParquet(SessionParquet.Options(path=path, test_path=path))
    wrapper = hot_batches(inner, {}, Known([ITEM], {"t_item": cached([0])}))
    one, other = ([rows.data for rows in reader(data, "test")] for data in (inner, wrapper))
    assert one == other


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        ({}, "no table has a cache"),
        ({"t_item": cached([0], "lru"), "t_seen": cached([0])}, r"'t_item' \(lru\) change"),
        ({"t_item": cached([IDS + 3])}, f"row {IDS + 3}, but the table has only {IDS} rows"),
    ],
)
def test_caches_that_make_no_sample_hot(
    tmp_path: Path, caches: Mapping[str, TableCache], message: str
) -> None:
    wrapper = hot_batches(parquet(tmp_path), {}, Known([ITEM, SEEN], caches))
    with pytest.raises(SetupError, match=message):
        read(wrapper)
    with pytest.raises(SetupError, match=message):
        wrapper.check()


def test_sessions_of_a_dataset_without_any(tmp_path: Path) -> None:
    class Sessionless(SessionParquet):
        session_keys = Dataset.session_keys  # type: ignore[assignment]

    inner = Sessionless(parquet(tmp_path).options)
    with pytest.raises(SetupError, match="Remove this option"):
        hot_batches(inner, {"sessions": True}).prepare()


def test_a_state_inside_a_window_of_other_hot_batches(tmp_path: Path) -> None:
    def hot(num_hot: int = 12, **options: object) -> Reader:
        return reader(sorted_by_caches(tmp_path, num_hot, **options))

    inside = hot()
    next(iter(inside))
    state = inside.state_dict()
    hot().load_state_dict(state)
    for other, message in (
        (hot(window=24), "'window' is 6, but .* 5"),
        (hot(sessions=True), "'sessions' is True, but .* False"),
        (hot(13), r"'hot_rows' is .* Restore the previous options"),
    ):
        with pytest.raises(DataError, match=message):
            other.load_state_dict(state)
    with pytest.raises(DataError, match="other dataset wrappers"):
        hot().load_state_dict(state["inner"])
    with pytest.raises(DataError, match=r"with a dataset wrapper around .* dataset\.wrap"):
        reader(parquet(tmp_path)).load_state_dict(state)


def test_a_state_at_the_start_of_a_window_fits_any_window(tmp_path: Path) -> None:
    def prices(batches: Iterable[Rows]) -> list[float]:
        return sorted(price for rows in batches for price in rows.data["price"].to_pylist())

    whole = reader(sorted_by_caches(tmp_path, window=20))
    taken = list(islice(whole, 5))
    other = reader(sorted_by_caches(tmp_path, window=8, sessions=True))
    other.load_state_dict(whole.state_dict())
    assert prices([*taken, *other]) == prices(read(parquet(tmp_path)))
