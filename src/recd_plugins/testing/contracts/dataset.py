"""The contract of datasets."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from recd_plugins.data.prepared import smallest_batch
from recd_plugins.errors import DataError
from recd_plugins.interfaces import Dataset, DatasetWrapper, Reader, Rows, Split
from recd_plugins.testing.contracts.plugin import PluginContract

#: File and row in it, and of rows that a wrapper hands out together which one.
RowId = tuple[str, int, int]


class DatasetContract(PluginContract):
    """Tests of a dataset plugin: override the fixture ``plugin``.

    The data should be small, a hundred rows or so, and enough for two batches on three ranks. Of a
    wrapper that adds rows ``batch_size`` is a multiple of its ``rows_together``, and larger.
    """

    batch_size: ClassVar[int] = 4
    split: ClassVar[Split] = "train"

    def rows_left_out(self, world_size: int, batch_size: int) -> int:
        """The most rows that fill no batch on every rank; override it where rows are dealt in
        larger pieces."""
        return world_size * batch_size - 1

    @pytest.fixture
    def dataset(self, plugin: Dataset) -> Dataset:
        """The plugin, prepared twice: the second time finds everything there."""
        plugin.prepare()
        plugin.prepare()
        return plugin

    def test_columns_are_what_the_schema_says(self, dataset: Dataset) -> None:
        schema = dataset.schema()
        rows = next(iter(self._reader(dataset)))
        columns = [*schema.sparse, *schema.dense, schema.label]
        assert len(set(columns)) == len(columns), "a column stands in the schema twice"
        left_out = dataset.left_out()
        assert not left_out.keys() & set(columns), "a column is left out and in the schema"
        assert all(left_out.values()), "a column is left out without why"
        for name in schema.sparse:
            kind = rows.data.schema.field(name).type
            ids = kind.value_type if pa.types.is_list(kind) else kind
            assert pa.types.is_int64(ids), f"{name} is {kind}; ids are int64 or list<int64>"
        for name in (*schema.dense, schema.label):
            kind = rows.data.schema.field(name).type
            assert pa.types.is_integer(kind) or pa.types.is_floating(kind), f"{name} is {kind}"
        labels = set(rows.data.column(schema.label).to_pylist())
        assert labels <= {0, 1}, f"labels are 0 or 1, not {labels}"

    def test_splits_names_what_can_be_read(self, dataset: Dataset) -> None:
        """Only what it names is read: a test split that it leaves out is never evaluated."""
        splits = dataset.splits()
        assert "train" in splits, f"splits() is {splits}; every dataset has the split train"
        try:
            dataset.reader(rank=0, world_size=1, batch_size=1, split="test")
        except DataError as error:
            refusal = str(error)
            assert "test" not in splits, f"splits() names test, which reader refuses: {refusal}"
        else:
            assert "test" in splits, (
                "reader(split='test') gives rows and splits() lacks test: it would never be "
                "evaluated. Add it to splits(), or raise DataError where there is no test split"
            )

    def test_batches_are_full_and_say_where_rows_come_from(self, dataset: Dataset) -> None:
        for rows in self._reader(dataset):
            assert len(rows) == self.batch_size
            assert sum(origin.num_rows for origin in rows.origins) == self.batch_size

    @pytest.mark.parametrize("world_size", [1, 2, 3])
    def test_every_rank_takes_as_many_steps(self, dataset: Dataset, world_size: int) -> None:
        readers = [self._reader(dataset, rank, world_size) for rank in range(world_size)]
        announced = {len(reader) for reader in readers}
        read = {sum(1 for _ in reader) for reader in readers}
        assert announced == read, "len() is the number of batches"
        assert len(read) == 1, f"ranks take {sorted(read)} steps; all must take the same number"

    @pytest.mark.parametrize("world_size", [1, 2, 3])
    def test_no_row_comes_twice_or_is_lost(self, dataset: Dataset, world_size: int) -> None:
        everything = self._everything(dataset)
        batches = [
            rows for rank in range(world_size) for rows in self._reader(dataset, rank, world_size)
        ]
        read = _contents(batches, smallest_batch(dataset))
        for row, content in read.items():
            assert row in everything, f"{_named(row)} is none that one rank reads"
            assert content == everything[row], f"{_named(row)} is not the row that it says it is"
        lost = len(everything) - len(read)
        assert lost <= self.rows_left_out(world_size, self.batch_size), f"{lost} rows are lost"

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_rows_that_fill_no_batch_are_the_last(self, dataset: Dataset, world_size: int) -> None:
        """Evaluation reads them by a reader of one row a batch, behind those that were read."""
        if isinstance(dataset, DatasetWrapper):
            return  # evaluation reads what it wraps
        everything = list(_contents(self._reader(dataset, batch_size=1)))
        readers = [self._reader(dataset, rank, world_size) for rank in range(world_size)]
        read = _contents(rows for reader in readers for rows in reader)
        assert read.keys() == set(everything[: len(read)]), "rows before the last ones are left out"

    def test_a_wrapper_keeps_each_row(self, dataset: Dataset) -> None:
        """Whole rows of its inner dataset, each once: what measures the data reads that one."""
        if not isinstance(dataset, DatasetWrapper) or dataset.rows_together > 1:
            return
        inner = _contents(self._reader(dataset.inner, batch_size=1))
        for batch_size in (1, self.batch_size):
            kept = _contents(self._reader(dataset, batch_size=batch_size))
            for row, content in kept.items():
                assert row in inner, f"{_named(row)} is none of the inner dataset's"
                same = {name: content.get(name) for name in inner[row]}
                assert same == inner[row], f"{_named(row)} is another than in the inner dataset"
            lost = sorted(inner.keys() - kept.keys())
            # In larger batches the last rows may fill none.
            most = self.rows_left_out(1, batch_size) if batch_size > 1 else 0
            assert len(lost) <= most, (
                f"{len(lost)} rows of the inner dataset are lost in batches of {batch_size}, as "
                f"{_named(lost[0])}"
            )

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_goes_on_where_a_state_was_taken(self, dataset: Dataset, world_size: int) -> None:
        """States of every step, on every rank, in a new reader, through JSON."""
        for rank in range(world_size):
            reader = self._reader(dataset, rank, world_size)
            states, batches = [_state(reader)], []
            for rows in reader:
                batches.append(rows)
                states.append(_state(reader))
            for step, state in enumerate(states[:-1]):
                resumed = self._reader(dataset, rank, world_size)
                resumed.load_state_dict(state)
                rest = [rows.data for rows in resumed]
                assert rest == [rows.data for rows in batches[step:]], f"after step {step}"

    def test_state_is_equal_on_every_rank(self, dataset: Dataset) -> None:
        readers = [self._reader(dataset, rank, 2) for rank in range(2)]
        for _ in zip(*readers, strict=True):
            first, second = (_state(reader) for reader in readers)
            assert first == second

    def test_starts_again_after_the_end(self, dataset: Dataset) -> None:
        reader = self._reader(dataset)
        together = smallest_batch(dataset)
        first = _contents(reader, together)
        at_the_end = _state(reader)
        again = _contents(reader, together)
        assert len(again) == len(first), "the second epoch has other steps"
        resumed = self._reader(dataset)
        resumed.load_state_dict(at_the_end)
        assert _contents(resumed, together) == again, "a state of the end is one of a start"

    @pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
    def test_state_loads_at_another_number_of_ranks(
        self, dataset: Dataset, before: int, after: int
    ) -> None:
        """What is left is dealt anew: nothing twice, nothing lost but what fills no batch."""
        everything = self._everything(dataset)
        first: list[Rows] = []
        for rank in range(before):
            reader = self._reader(dataset, rank, before)
            first.append(next(iter(reader)))
            state = _state(reader)
        rest: list[Rows] = []
        for rank in range(after):
            reader = self._reader(dataset, rank, after)
            reader.load_state_dict(state)
            rest += list(reader)
        read = _contents([*first, *rest], smallest_batch(dataset))
        lost = len(everything) - len(read)
        assert lost <= self.rows_left_out(after, self.batch_size), f"{lost} rows are lost"

    @pytest.mark.parametrize("num_workers", [1, 2, 3])
    def test_workers_share_the_batches(self, dataset: Dataset, num_workers: int) -> None:
        """Blocks in turn are the batches of one reader, with the positions that it has."""
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
        batches = list(whole)
        at_the_end = _state(whole)
        for num_batches in range(len(batches) + 1):
            reader = self._reader(dataset)
            assert reader.skip(num_batches) == num_batches
            position = _state(reader)
            left = len(batches) - num_batches
            assert reader.num_left() in (None, left), f"num_left after {num_batches}"
            rest = [rows.data for rows in reader]
            assert rest == [rows.data for rows in batches[num_batches:]], f"after {num_batches}"
            resumed = self._reader(dataset)
            resumed.load_state_dict(position)
            assert [rows.data for rows in resumed] == rest, f"a state after {num_batches}"
        reader = self._reader(dataset)
        assert reader.skip(len(batches) + 1) == len(batches)
        assert _state(reader) == at_the_end, "the position returns to the start at the end"

    def test_rows_say_their_session_where_they_are_asked_to(self, dataset: Dataset) -> None:
        """``session_reader`` is optional; where it is there it is ``reader`` with a column more."""
        arguments: dict[str, Any] = {
            "rank": 0,
            "world_size": 1,
            "batch_size": self.batch_size,
            "split": self.split,
        }
        try:
            reader = dataset.session_reader(**arguments)
        except DataError:
            return
        keys = dataset.session_keys()
        assert keys is not None, "session_keys says which column that of the session is"
        plain = self._reader(dataset)
        for rows, expected in zip(reader, plain, strict=True):
            names = expected.data.schema.names
            assert rows.data.select(names) == expected.data
            assert keys.session in rows.data.schema.names, "session_reader lacks that column"
            assert _state(reader) == _state(plain), "states are those of reader"

    def test_refuses_a_state_of_another_batch_size(self, dataset: Dataset) -> None:
        reader = self._reader(dataset, batch_size=smallest_batch(dataset))
        next(iter(reader))
        with pytest.raises(DataError):
            self._reader(dataset).load_state_dict(_state(reader))

    def test_refuses_a_split_with_too_few_rows(self, dataset: Dataset) -> None:
        step = smallest_batch(dataset)
        rows = len(self._reader(dataset, batch_size=step)) * step
        with pytest.raises(DataError):
            self._reader(dataset, batch_size=rows + step)

    def test_scan_and_session_keys_come_together(self, dataset: Dataset) -> None:
        """A dataset that knows its sessions can be scanned, and one that does not says so."""
        keys = dataset.session_keys()
        if keys is None:
            with pytest.raises(DataError):
                list(dataset.scan(self.split))
            return
        schema = dataset.schema()
        wanted = {*schema.sparse, *schema.dense, schema.label, keys.session, keys.timestamp}
        for rows in dataset.scan(self.split):
            missing = wanted - set(rows.data.schema.names)
            assert not missing, f"scan yields no {', '.join(sorted(missing))}"
            for name in (keys.session, keys.timestamp):
                assert rows.data.column(name).null_count == 0, f"{name} has nulls"

    def test_scan_yields_every_row_once(self, dataset: Dataset) -> None:
        if dataset.session_keys() is None or smallest_batch(dataset) > 1:
            return
        scanned = list(dataset.scan(self.split))
        contents = _contents(scanned)
        read = self._everything(dataset)
        assert contents.keys() == read.keys(), "scan and reader have other rows"
        for row, content in read.items():
            same = {name: contents[row][name] for name in content}
            assert same == content, f"{_named(row)} differs between scan and reader"
        again = [rows.data for rows in dataset.scan(self.split)]
        assert again == [rows.data for rows in scanned], "a second scan yields something else"

    def test_identity_is_of_the_rows(self, dataset: Dataset) -> None:
        """Two objects say the same, in JSON; ``--resume`` compares it."""
        identity = dataset.identity()
        copy = json.loads(json.dumps(identity, allow_nan=False))
        assert copy == identity, "an identity holds JSON values only"
        assert "schema" not in identity, "the key schema has the columns; take another"
        if isinstance(dataset, DatasetWrapper):
            return  # it is made around another
        again = type(dataset)(dataset.options)
        again.prepare()
        assert again.identity() == identity, "the same rows are known by something else"

    def _everything(self, dataset: Dataset) -> dict[RowId, dict[str, Any]]:
        """All rows, as one rank reads them in the smallest batches."""
        size = smallest_batch(dataset)
        return _contents(self._reader(dataset, batch_size=size), size)

    def _reader(
        self,
        dataset: Dataset,
        rank: int = 0,
        world_size: int = 1,
        batch_size: int | None = None,
    ) -> Reader:
        return dataset.reader(
            rank=rank,
            world_size=world_size,
            batch_size=batch_size or self.batch_size,
            split=self.split,
        )


def _contents(batches: Iterable[Rows], together: int = 1) -> dict[RowId, dict[str, Any]]:
    """Rows by where they are from, each once; of ``together`` ones, by where the first is from."""
    found: dict[RowId, dict[str, Any]] = {}
    for rows in batches:
        for index, content in enumerate(rows.data.to_pylist()):
            row = (*rows.origin_of(index - index % together), index % together)
            assert row not in found, f"{_named(row)} came twice"
            found[row] = content
    return found


def _named(row: RowId) -> str:
    """As ``clicks.parquet: row 3 (from 0)``."""
    path, number, place = row
    return f"{path}: row {number} (from 0)" + (f", number {place} of its rows" if place else "")


def _state(reader: Reader) -> dict[str, Any]:
    """The state as a checkpoint holds it."""
    state = reader.state_dict()
    copy: dict[str, Any] = json.loads(json.dumps(state, allow_nan=False))
    assert copy == state, "a state holds JSON values only"
    return copy
