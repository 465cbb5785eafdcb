from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.data.storage.conftest import table
from tests.data.storage.counted_store import Store

from recd_plugin_recd.session_parquet import SessionParquet
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
        {"where": [["day", "==", 2]]},
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


def test_a_filter_rules_out_files_and_row_groups(store, folder):
    sizes = {
        f"tables/{file.relative_to(folder.parent).as_posix()}": file.stat().st_size
        for file in folder.rglob("part.parquet")
    }
    paths, num_bytes = [], []
    for where in ([], [["hour", "==", 9]], [["day", "==", "01"]]):
        data = dataset(URL, store, where=where)
        data.prepare()
        store.taken()
        list(reader(data, batch_size=5))
        # What reaches the end of its file reads the footer.
        read = [each for each in store.taken() if each.stop < sizes[each.path]]
        paths.append({each.path for each in read})
        num_bytes.append(sum(each.stop - each.start for each in read))
    # Hour 9 is 25 of the last 30 rows: row groups before it were ruled out by their statistics.
    assert paths[1:] == [{f"tables/clicks/day={day}/part.parquet"} for day in ("02", "01")]
    assert num_bytes[1] < num_bytes[0] / 4


@pytest.mark.parametrize("batches_before", [0, 1])
def test_an_object_of_equal_size_is_noticed(store, tmp_path, batches_before):
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
