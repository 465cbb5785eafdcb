"""Test suite for dataset plugins."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from recd_plugins.data.prepared import smallest_batch
from recd_plugins.interfaces import (
    Dataset,
    DatasetWrapper,
    FeatureSchema,
    Reader,
    Rows,
    Split,
)
from recd_plugins.runtime.errors import DataError
from recd_plugins.testing.contracts.plugin import PluginContract

#: Origin of a row: file, row in the file, and index among the rows that a wrapper derives from it.
RowId = tuple[str, int, int]
Contents = dict[RowId, dict[str, Any]]


class DatasetContract(PluginContract):
    """Test suite for a dataset plugin. Subclasses override the fixture ``plugin``.

    The dataset should have about a hundred rows, enough for two batches on each of three ranks. For
    a dataset wrapper with ``rows_together`` > 1, ``batch_size`` must be a larger multiple of it.
    """

    batch_size: ClassVar[int] = 4
    split: ClassVar[Split] = "train"

    def rows_left_out(self, world_size: int, batch_size: int) -> int:
        """Return the maximum number of rows after the last full batch of all ranks."""
        return world_size * batch_size - 1

    @pytest.fixture
    def dataset(self, plugin: Dataset) -> Dataset:
        """Return the plugin. Calls ``prepare`` twice, because repeated calls must be harmless."""
        plugin.prepare()
        plugin.prepare()
        return plugin

    def test_columns_are_what_the_schema_says(self, dataset: Dataset) -> None:
        schema, left_out = dataset.schema(), dataset.left_out()
        assert isinstance(schema, FeatureSchema)
        assert isinstance(schema.sparse, tuple)
        assert isinstance(schema.dense, tuple), "feature names are tuples"
        columns = [*schema.sparse, *schema.dense, *schema.labels]
        assert len(set(columns)) == len(columns), "a column stands in the schema twice"
        assert not left_out.keys() & set(columns), "a column is left out and in the schema"
        assert all(left_out.values()), "left_out gives a reason for each column"
        rows = next(iter(self._reader(dataset)))
        assert isinstance(rows, Rows)
        for name in columns:
            kind = rows.data.schema.field(name).type
            if name in schema.sparse:
                ids = kind.value_type if pa.types.is_list(kind) else kind
                assert pa.types.is_int64(ids), f"{name} is {kind}; ids are int64 or list<int64>"
            else:
                assert pa.types.is_integer(kind) or pa.types.is_floating(kind), f"{name} is {kind}"
        labels = set() if schema.tasks else set(rows.data.column(schema.label).to_pylist())
        assert labels <= {0, 1}, f"labels are 0 or 1, not {labels}"

    def test_splits_names_what_can_be_read(self, dataset: Dataset) -> None:
        """``splits`` must name every readable split. Other splits would never be evaluated."""
        splits = dataset.splits()
        assert "train" in splits, f"splits() is {splits}; every dataset has the split train"
        try:
            dataset.reader(rank=0, world_size=1, batch_size=1, split="test")
        except DataError as error:
            refusal = str(error)
            assert "test" not in splits, f"splits() names test, which reader refuses: {refusal}"
        else:
            assert "test" in splits, "splits() lacks test, which reader reads"

    @pytest.mark.parametrize("world_size", [1, 2, 3])
    def test_every_rank_takes_as_many_steps(self, dataset: Dataset, world_size: int) -> None:
        readers = [self._reader(dataset, rank, world_size) for rank in range(world_size)]
        batches = [list(reader) for reader in readers]
        read = {len(of_rank) for of_rank in batches}
        assert {len(reader) for reader in readers} == read, "len() is the number of batches"
        assert len(read) == 1, f"ranks take {sorted(read)} steps; all must take the same number"
        if isinstance(dataset, DatasetWrapper) and dataset.uneven_batches:
            return
        for rows in (rows for of_rank in batches for rows in of_rank):
            assert len(rows) == self.batch_size, "every batch is full"
            assert sum(origin.num_rows for origin in rows.origins) == self.batch_size

    @pytest.mark.parametrize("world_size", [1, 2, 3])
    def test_no_row_comes_twice_or_is_lost(self, dataset: Dataset, world_size: int) -> None:
        everything = self._everything(dataset)
        batches = [
            rows for rank in range(world_size) for rows in self._reader(dataset, rank, world_size)
        ]
        read = _contents(batches, smallest_batch(dataset))
        _assert_rows(read, everything)
        lost = len(everything) - len(read)
        assert lost <= self.rows_left_out(world_size, self.batch_size), f"{lost} rows are lost"
        if not isinstance(dataset, DatasetWrapper):  # evaluation reads the inner dataset
            last = [*everything][: len(read)]
            assert read.keys() == {*last}, "rows that fill no batch are not the last ones"

    def test_a_wrapper_keeps_each_row(self, dataset: Dataset) -> None:
        """A dataset wrapper must keep all rows of the dataset that it wraps."""
        if not isinstance(dataset, DatasetWrapper) or dataset.rows_together > 1:
            return
        inner = _contents(self._reader(dataset.inner, batch_size=1))
        for batch_size in (1, self.batch_size):
            kept = _contents(self._reader(dataset, batch_size=batch_size))
            _assert_rows(kept, inner)
            lost = sorted(inner.keys() - kept.keys())
            # With larger batches, the last rows may not fill a batch.
            most = self.rows_left_out(1, batch_size) if batch_size > 1 else 0
            assert len(lost) <= most, (
                f"{len(lost)} rows of the inner dataset are lost in batches of {batch_size}, as "
                f"{_named(lost[0])}"
            )

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_goes_on_where_a_state_was_taken(self, dataset: Dataset, world_size: int) -> None:
        """Reading must continue from a saved state. All ranks must have equal states."""
        of_ranks = []
        for rank in range(world_size):
            reader = self._reader(dataset, rank, world_size)
            states, batches = [_state(reader)], []
            for rows in reader:
                batches.append(rows.data)
                states.append(_state(reader))
            of_ranks.append(states)
            for step, state in enumerate(states[:-1]):
                resumed = self._reader(dataset, rank, world_size)
                resumed.load_state_dict(state)
                assert [rows.data for rows in resumed] == batches[step:], f"after step {step}"
        assert of_ranks == of_ranks[:1] * world_size, "ranks have different states"

    def test_starts_again_after_the_end(self, dataset: Dataset) -> None:
        reader, together = self._reader(dataset), smallest_batch(dataset)
        first, at_the_end = _contents(reader, together), _state(reader)
        again = _contents(reader, together)
        assert len(again) == len(first), "the second epoch has another number of steps"
        resumed = self._reader(dataset)
        resumed.load_state_dict(at_the_end)
        assert _contents(resumed, together) == again, "the state at the end starts no new epoch"

    @pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
    def test_state_loads_at_another_number_of_ranks(
        self, dataset: Dataset, before: int, after: int
    ) -> None:
        """Remaining rows must be redistributed to the new ranks. No row may be read twice."""
        everything = self._everything(dataset)
        batches: list[Rows] = []
        for rank in range(before):
            reader = self._reader(dataset, rank, before)
            batches.append(next(iter(reader)))
            state = _state(reader)
        for rank in range(after):
            reader = self._reader(dataset, rank, after)
            reader.load_state_dict(state)
            batches += reader
        lost = len(everything) - len(_contents(batches, smallest_batch(dataset)))
        assert lost <= self.rows_left_out(after, self.batch_size), f"{lost} rows are lost"

    @pytest.mark.parametrize("num_workers", [1, 2, 3])
    def test_workers_share_the_batches(self, dataset: Dataset, num_workers: int) -> None:
        """The blocks of all workers, read alternately, must equal the batches of one reader."""
        alone = self._reader(dataset)
        taken = iter(alone)
        next(taken)
        start = _state(alone)
        expected = [(rows.data, _state(alone)) for rows in taken]
        readers = [self._reader(dataset) for _ in range(num_workers)]
        shares = []
        for worker, reader in enumerate(readers):
            reader.load_state_dict(start)
            blocks = reader.blocks(worker, num_workers)
            shares.append([[(rows.data, _state(reader)) for rows in block] for block in blocks])
        in_turn = [block for turn in zip_longest(*shares, fillvalue=[]) for block in turn]
        assert [batch for block in in_turn for batch in block] == expected
        assert [_state(reader) for reader in readers] == [_state(alone)] * num_workers

    def test_passes_over_batches_as_if_they_were_read(self, dataset: Dataset) -> None:
        whole = self._reader(dataset)
        batches = [rows.data for rows in whole]
        for num_batches in range(len(batches) + 1):
            reader, resumed = self._reader(dataset), self._reader(dataset)
            assert reader.skip(num_batches) == num_batches
            resumed.load_state_dict(_state(reader))
            left = len(batches) - num_batches
            assert reader.num_left() in (None, left), f"num_left after {num_batches}"
            for each in (reader, resumed):
                rest = [rows.data for rows in each]
                assert rest == batches[num_batches:], f"after {num_batches}"
        reader = self._reader(dataset)
        assert reader.skip(len(batches) + 1) == len(batches)
        assert _state(reader) == _state(whole), "the position returns to the start at the end"

    def test_session_reader_adds_the_session(self, dataset: Dataset) -> None:
        """``session_reader`` must yield the batches of ``reader`` plus session and request.

        Datasets without sessions may raise DataError.
        """
        size = self.batch_size
        try:
            reader = dataset.session_reader(rank=0, world_size=1, batch_size=size, split=self.split)
        except DataError:
            return
        keys = dataset.session_keys()
        assert keys is not None, "session_keys names the column of the session"
        plain = self._reader(dataset)
        for rows, expected in zip(reader, plain, strict=True):
            assert rows.data.select(expected.data.schema.names) == expected.data
            assert keys.groups <= {*rows.data.schema.names}, "session_reader lacks a column"
            assert _state(reader) == _state(plain), "states are those of reader"

    def test_refuses_another_batch_size_and_too_few_rows(self, dataset: Dataset) -> None:
        step = smallest_batch(dataset)
        reader = self._reader(dataset, batch_size=step)
        rows = len(reader) * step
        next(iter(reader))
        with pytest.raises(DataError):
            self._reader(dataset).load_state_dict(_state(reader))
        with pytest.raises(DataError):
            self._reader(dataset, batch_size=rows + step)

    def test_scan_yields_every_row_once(self, dataset: Dataset) -> None:
        """``scan`` must yield every row once. Datasets without sessions must raise DataError."""
        keys = dataset.session_keys()
        if keys is None:
            with pytest.raises(DataError):
                list(dataset.scan(self.split))
            return
        assert all(isinstance(name, str) for pair in dataset.keys().items() for name in pair)
        schema = dataset.schema()
        wanted = {*schema.sparse, *schema.dense, *schema.labels, keys.session, keys.timestamp}
        scanned = list(dataset.scan(self.split))
        for rows in scanned:
            missing = wanted - set(rows.data.schema.names)
            assert not missing, f"scan yields no columns {', '.join(map(repr, sorted(missing)))}"
            for name in (keys.session, keys.timestamp):
                assert rows.data.column(name).null_count == 0, f"{name} has nulls"
        if smallest_batch(dataset) > 1:
            return
        contents, read = _contents(scanned), self._everything(dataset)
        assert contents.keys() == read.keys(), "scan and reader have other rows"
        _assert_rows(read, contents)
        again = [rows.data for rows in dataset.scan(self.split)]
        assert again == [rows.data for rows in scanned], "a second scan yields something else"

    def test_identity_is_of_the_rows(self, dataset: Dataset) -> None:
        """Equal rows must have equal identities, because ``--resume`` compares identities."""
        identity = dataset.identity()
        copy = json.loads(json.dumps(identity, allow_nan=False))
        assert copy == identity, "an identity holds JSON values only"
        assert "schema" not in identity, "the key schema has the columns; take another"
        if not isinstance(dataset, DatasetWrapper):
            again = type(dataset)(dataset.options)
            again.prepare()
            assert again.identity() == identity, "the same rows have another identity"

    def _everything(self, dataset: Dataset) -> Contents:
        size = smallest_batch(dataset)
        return _contents(self._reader(dataset, batch_size=size), size)

    def _reader(
        self,
        dataset: Dataset,
        rank: int = 0,
        world_size: int = 1,
        batch_size: int | None = None,
    ) -> Reader:
        reader = dataset.reader(
            rank=rank,
            world_size=world_size,
            batch_size=batch_size or self.batch_size,
            split=self.split,
        )
        assert isinstance(reader, Reader)
        return reader


def _contents(batches: Iterable[Rows], together: int = 1) -> Contents:
    found: Contents = {}
    for rows in batches:
        for index, content in enumerate(rows.data.to_pylist()):
            row = (*rows.origin_of(index - index % together), index % together)
            assert row not in found, f"{_named(row)} came twice"
            found[row] = content
    return found


def _assert_rows(rows: Contents, source: Contents) -> None:
    for row, content in rows.items():
        assert row in source, f"{_named(row)} is no row of the data"
        shared = content.keys() & source[row].keys()
        assert {name: content[name] for name in shared} == {
            name: source[row][name] for name in shared
        }, f"{_named(row)} differs from the row of its origin"


def _named(row: RowId) -> str:
    path, number, place = row
    return f"{path}: row {number} (from 0)" + (f", number {place} of its rows" if place else "")


def _state(reader: Reader) -> dict[str, Any]:
    state = reader.state_dict()
    copy: dict[str, Any] = json.loads(json.dumps(state, allow_nan=False))
    assert copy == state, "a state holds JSON values only"
    return copy
