"""Dataset ``dlrm.trace``: ids have the profiled locality, and are drawn once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugin_dlrm import random_rows
from recd_plugin_dlrm.trace import dataset as trace_dataset
from recd_plugin_dlrm.trace.dataset import Trace
from recd_plugin_dlrm.trace.generator import StackDistances, profile_ids, worst_difference
from recd_plugin_dlrm.trace.profile import TraceProfile, write_profile
from recd_plugins.interfaces import Split
from recd_plugins.runtime.errors import DataError
from recd_plugins.testing.contracts import DatasetContract


def profile(folder: Path, name: str = "profile.parquet", seed: int = 0) -> Path:
    random = np.random.default_rng(seed)
    few, many = StackDistances(), StackDistances()
    few.add(random.integers(0, 30, 5000))
    many.add(random.zipf(1.3, 15_000) % 1000 + 10**12)
    traces = [few.trace("few", 5000), many.trace("many", 5000)]
    made = TraceProfile({trace.table: trace for trace in traces}, "a test")
    write_profile(made, folder / name)
    return folder / name


def dataset(folder: Path, **options: Any) -> Trace:
    given = {"rows": 5000, "profile": folder / "profile.parquet", "path": folder / "rows.parquet"}
    made = Trace(Trace.Options.model_validate({**given, "prefetch": 0, **options}))
    made.prepare()
    return made


def read(made: Trace, batch_size: int = 500, split: Split = "train") -> pa.Table:
    reader = made.reader(rank=0, world_size=1, batch_size=batch_size, split=split)
    return pa.Table.from_batches([rows.data for rows in reader]).combine_chunks()


class TestAcrossRowGroups(DatasetContract):
    @pytest.fixture
    def plugin(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
        for module in (random_rows, trace_dataset):
            monkeypatch.setattr(module, "UNIT_ROWS", 64)
        options = {"rows": 110, "test_rows": 70, "dense": 1, "tables": ["t_few"]}
        places = {"profile": profile(tmp_path), "path": tmp_path / "rows.parquet"}
        return Trace(Trace.Options.model_validate({**options, **places}))


def test_ids_have_the_locality_of_their_traces(tmp_path: Path) -> None:
    profile(tmp_path)
    made = dataset(tmp_path)
    table = read(made)
    assert made.schema().sparse == ("few", "many")
    random = np.random.default_rng(0)
    originals = {"few": random.integers(0, 30, 5000), "many": random.zipf(1.3, 15_000) % 1000}
    for name, length in (("few", 1), ("many", 3)):
        lists = table[name].combine_chunks()
        assert set(np.diff(lists.offsets)) == {length}
        original, found = profile_ids(originals[name]), profile_ids(np.asarray(lists.flatten()))
        counts = np.zeros(len(original.distances), np.int64)
        counts[np.searchsorted(original.distances, found.distances)] = found.counts
        assert worst_difference(original, counts) < 0.015
    assert min(np.asarray(table["many"].combine_chunks().flatten())) >= 10**12


def test_the_test_split_goes_on_with_the_trace(tmp_path: Path) -> None:
    profile(tmp_path)
    whole = read(dataset(tmp_path, rows=6000, min_new=0.1, path=tmp_path / "whole.parquet"))
    made = dataset(tmp_path, rows=5000, test_rows=1000, min_new=0.1)
    assert made.splits() == ("train", "test")
    assert read(made).equals(whole.slice(0, 5000))
    assert read(made, split="test").equals(whole.slice(5000))
    with pytest.raises(DataError, match="Set option 'test_rows'"):
        read(dataset(tmp_path, path=tmp_path / "other.parquet"), split="test")


def test_what_is_drawn_stays_and_says_how_it_was_made(tmp_path: Path) -> None:
    profile(tmp_path)
    dataset(tmp_path)
    before = (tmp_path / "rows.parquet").stat().st_mtime_ns
    dataset(tmp_path)
    assert (tmp_path / "rows.parquet").stat().st_mtime_ns == before
    with pytest.raises(DataError, match="other options: option 'seed' was 0 and is now 1"):
        dataset(tmp_path, seed=1)
    profile(tmp_path, seed=7)
    with pytest.raises(DataError, match="other options: option 'traces' was"):
        dataset(tmp_path)


def test_a_draw_that_fails_leaves_nothing(tmp_path: Path) -> None:
    once = profile_ids(np.arange(100))
    write_profile(TraceProfile({once.table: once}, "a test"), tmp_path / "profile.parquet")
    with pytest.raises(DataError, match="table 't_id': the original trace repeats no id"):
        dataset(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["profile.parquet"]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"profile\.parquet: the file cannot be read as Parquet"):
        dataset(tmp_path)
    profile(tmp_path)
    with pytest.raises(DataError, match=r"t_fex' matches no table\. Did you mean 't_few"):
        dataset(tmp_path, tables=["t_fex"])
    pq.write_table(pa.table({"x": [1]}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"was not generated by dataset 'dlrm"):
        dataset(tmp_path)
