"""A table in an S3-compatible store: the rows of the same table on disk, bit for bit."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.data.storage.conftest import table
from tests.data.storage.counted_store import Store, num_bytes, of_columns

from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugins.data.parquet import ParquetTable
from recd_plugins.data.reader import Piece
from recd_plugins.data.row_groups import read_splits
from recd_plugins.interfaces.rows import Storage
from recd_plugins.runtime.errors import DataError

URL = "s3://tables/clicks"


def dataset(path: Any, store: Store | None = None, **options: Any) -> SessionParquet:
    if store is not None:
        options["storage"] = {"endpoint": store.endpoint, "region": "us-east-1"}
    return SessionParquet(SessionParquet.Options.model_validate({"path": path, **options}))


def reader(data: SessionParquet, rank: int = 0, world_size: int = 1, batch_size: int = 20):
    return data.reader(rank=rank, world_size=world_size, batch_size=batch_size, split="train")


def numbers(batches) -> list[int]:
    return [int(number) for rows in batches for number in rows.data["price"].to_pylist()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True, "prefetch": 0},
        {"sparse": ["liked"], "dense": []},
        {"where": [["hour", ">=", 3], ["price", "<", 222.5], ["label", "==", 1]]},
        {"where": [["day", "==", 2]], "read": {"pre_buffer": False}},
        {"read": {"hole_size_limit": 0, "range_size_limit": 1}},
    ],
)
def test_s3_and_disk_give_the_same_batches(folder, store, options):
    here, there = dataset(folder, **options), dataset(URL, store, **options)
    for data in (here, there):
        data.prepare()
    for rank in range(2):
        mine, theirs = list(reader(here, rank, 2)), list(reader(there, rank, 2))
        assert [rows.data for rows in mine] == [rows.data for rows in theirs]
        for one, other in zip(mine, theirs, strict=True):
            for row in (0, 7, 19):
                path, number = one.origin_of(row)
                below = Path(path).relative_to(folder).as_posix()
                assert other.origin_of(row) == (f"{URL}/{below}", number)


def test_a_state_moves_between_disk_and_s3(folder, store):
    here, there = reader(dataset(folder)), reader(dataset(URL, store))
    batches = iter(here)
    first = numbers([next(batches) for _ in range(4)])
    there.load_state_dict(json.loads(json.dumps(here.state_dict())))
    assert first + numbers(there) == list(range(240))


def test_a_pickled_split_reads_by_itself(store):
    storage = Storage(endpoint=store.endpoint, region="us-east-1")
    whole = ParquetTable(URL, storage)
    pieces = [Piece(unit, 1, unit.num_rows - 2) for unit in whole.units]
    splits = list(whole.splits(iter(pieces), whole.schema))
    assert len(splits) == len(whole.units)
    for split, rows in zip(splits, whole.read(iter(pieces), whole.schema), strict=True):
        (again,) = read_splits([pickle.loads(pickle.dumps(split))])
        assert again == rows


def test_bytes_read_are_those_of_columns_and_row_groups_that_are_asked_for(store, folder):
    sizes = _sizes(folder)
    chosen: dict[str, dict[str, Any]] = {
        "all": {},
        "one": {"sparse": ["liked"], "dense": []},
        "hour": {"where": [["hour", "==", 9]]},
        "day": {"where": [["day", "==", "01"]]},
    }
    read = {}
    for name, options in chosen.items():
        data = dataset(URL, store, **options, read={"hole_size_limit": 0})
        data.prepare()
        store.taken()
        list(reader(data, batch_size=5))
        read[name] = of_columns(store.taken(), sizes)
    for name, columns in {
        "all": ["seen", "liked", "price", "label"],
        "one": ["liked", "label"],
    }.items():
        assert num_bytes(read[name]) == _stored(folder, columns)
    # Hour 9 is 25 of the last 30 rows: row groups before it were ruled out by their statistics.
    assert {each.path for each in read["hour"]} == {"tables/clicks/day=02/part.parquet"}
    assert num_bytes(read["hour"]) < num_bytes(read["all"]) / 4
    assert {each.path for each in read["day"]} == {"tables/clicks/day=01/part.parquet"}


@pytest.mark.parametrize("batches_before", [0, 1])
def test_an_object_of_equal_size_is_noticed(store, tmp_path, batches_before):
    """Before it is read or after some of it was: then at its end."""
    options = {"compression": "none", "use_dictionary": False, "row_group_size": 20}
    path = tmp_path / "part.parquet"
    pq.write_table(table(range(300, 340)), path, write_statistics=False, **options)
    size = path.stat().st_size
    store.upload(tmp_path, "equal")
    batches = iter(reader(dataset("s3://equal/part.parquet", store, prefetch=0)))
    for _ in range(batches_before):
        next(batches)
    pq.write_table(table(range(600, 640)), path, write_statistics=False, **options)
    assert path.stat().st_size == size
    store.upload(tmp_path, "equal")
    with pytest.raises(DataError, match=r"s3://equal/part.parquet was replaced .*its ETag was"):
        list(batches)


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of the files of the table, as the store calls them."""
    return {
        f"tables/{file.relative_to(folder.parent).as_posix()}": file.stat().st_size
        for file in folder.rglob("part.parquet")
    }


def _stored(folder: Path, columns: list[str]) -> int:
    """Bytes of columns in the files of a table."""
    total = 0
    for file in folder.rglob("part.parquet"):
        metadata = pq.read_metadata(file)
        for group in range(metadata.num_row_groups):
            chunks = (metadata.row_group(group).column(index) for index in range(7))
            total += sum(
                chunk.total_compressed_size
                for chunk in chunks
                if chunk.path_in_schema.partition(".")[0] in columns
            )
    return total
