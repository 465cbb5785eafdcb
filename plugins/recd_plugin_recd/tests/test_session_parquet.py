from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugin_recd.sessions import open_source
from recd_plugins.interfaces import SessionKeys
from recd_plugins.runtime.errors import DataError
from recd_plugins.testing.contracts import DatasetContract

ROWS = 250


def table(rows: range, **columns: pa.Array) -> pa.Table:
    ids = [[i] * (i % 3) for i in rows]
    return pa.table(
        {
            "session_id": pa.array(rows, pa.int64()),
            "ts": pa.array(rows, pa.float64()),
            "label": pa.array([i % 2 for i in rows], pa.int8()),
            "price": pa.array(rows, pa.float32()),
            "seen": pa.array(ids, pa.list_(pa.int64())),
            "liked": pa.array(ids, pa.list_(pa.int32())),
            "country": pa.array(rows, pa.int64()),
            **columns,
        }
    )


@pytest.fixture
def folder(tmp_path) -> Path:
    for day, rows in (("01", range(100)), ("02", range(100, ROWS))):
        path = tmp_path / "table" / f"day={day}"
        path.mkdir(parents=True)
        pq.write_table(table(rows), path / "part.parquet", row_group_size=30)
    (tmp_path / "table" / "_committed.parquet").write_text("no Parquet, and no part of the table")
    return tmp_path / "table"


def dataset(path: Path, **options: object) -> SessionParquet:
    return SessionParquet(SessionParquet.Options.model_validate({"path": path, **options}))


def reader(data: SessionParquet, rank: int = 0, world_size: int = 1, batch_size: int = 20):
    return data.reader(rank=rank, world_size=world_size, batch_size=batch_size, split="train")


def numbers(batches) -> list[int]:
    return [int(number) for rows in batches for number in np.asarray(rows.data["price"])]


def test_schema_takes_lists_and_floats_but_no_session_time_or_label(folder):
    schema = dataset(folder).schema()
    assert (schema.sparse, schema.dense, schema.label) == (("seen", "liked"), ("price",), "label")
    schema = dataset(folder, sparse=["l*ed", "country"], dense=["pri?e"]).schema()
    assert (schema.sparse, schema.dense) == (("liked", "country"), ("price",))


def test_reads_every_column_in_the_order_of_the_files(folder):
    (rows,) = reader(dataset(folder), batch_size=ROWS)
    assert rows.data.schema.names == ["seen", "liked", "price", "label"]
    expected = table(range(ROWS))
    for name in ("seen", "price", "label"):
        assert rows.data[name].to_pylist() == expected[name].to_pylist()
    assert rows.data["liked"].type == pa.list_(pa.int64())
    assert rows.data["liked"].to_pylist() == expected["liked"].to_pylist()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch_size": 10}, "batch_size' was 20 and is now 10"),
        ({"shuffle": True}, "shuffle"),
        ({"more": True}, "rows' was 250 and is now 251"),
        ({"other": True}, "files"),
    ],
)
def test_state_of_other_data_is_refused(folder, change, named):
    state = reader(dataset(folder)).state_dict()
    if change.pop("more", False):
        pq.write_table(table(range(1)), folder / "more.parquet")
    if change.pop("other", False):
        (folder / "day=02").rename(folder / "day=03")
    batch_size = change.pop("batch_size", 20)
    with pytest.raises(DataError, match=named):
        reader(dataset(folder, **change), batch_size=batch_size).load_state_dict(state)


def test_state_moves_with_the_folder(folder, tmp_path):
    one = reader(dataset(folder))
    next(iter(one))
    state = one.state_dict()
    folder.rename(tmp_path / "elsewhere")
    moved = reader(dataset(tmp_path / "elsewhere"))
    moved.load_state_dict(state)
    assert numbers(moved) == list(range(20, 240))


def test_test_split_has_its_own_path(folder, tmp_path):
    pq.write_table(table(range(500, 540)), tmp_path / "test.parquet")
    data = dataset(folder, test_path=tmp_path / "test.parquet", shuffle=True)
    assert data.splits() == ("train", "test")
    rows = data.reader(rank=0, world_size=1, batch_size=40, split="test")
    assert numbers(rows) == list(range(500, 540))
    assert dataset(folder).splits() == ("train",)


def test_generates_a_missing_table_once(tmp_path):
    generate = {"rows": 600, "seed": 1, "row_group_rows": 128}
    path = tmp_path / "papercal"
    data = dataset(path, generate=generate)
    data.prepare()
    assert len(data.schema().sparse) == 40
    made = (path / "part-00000.parquet").stat()
    dataset(path, generate=generate).prepare()
    assert (path / "part-00000.parquet").stat() == made
    assert sum(map(len, reader(data, batch_size=100))) == 600
    with pytest.raises(DataError, match=r"the table was generated with.*'seed': 1.*'seed': 2"):
        dataset(path, generate={**generate, "seed": 2}).prepare()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"session": "sid"}, "no column 'sid'. Set the option 'session' to one of: 'session_id'"),
        ({"sparse": ["sean*"]}, r"'sean\*' in the option 'sparse' matches no column"),
        ({"sparse": ["price"]}, "column 'price' has the type float, which the option 'sparse'"),
        ({"dense": ["seen"]}, "column 'seen' has the type list"),
        ({"dense": ["price", "country"], "sparse": ["country"]}, "country' match both"),
        ({"label": "seen"}, "label column 'seen' has the type list"),
    ],
)
def test_wrong_columns_are_named(folder, options, message):
    with pytest.raises(DataError, match=message):
        dataset(folder, **options).prepare()


class TestContract(DatasetContract):
    @pytest.fixture
    def plugin(self, folder) -> SessionParquet:
        return dataset(folder)


@pytest.mark.parametrize(("option", "column"), [("session", "visit"), ("timestamp", "ttt")])
def test_commands_name_the_option_of_a_missing_column(folder, option, column):
    message = rf"part\.parquet: there is no column '{column}'.*--{option}: 'session_id', 'ts"
    with pytest.raises(DataError, match=message):
        open_source(folder, **{option: column})


def test_commands_read_the_training_split_of_a_registry_file(folder, tmp_path):
    options = f"{{path: {folder}, sparse: [seen], dense: [price]}}"
    dataset = f"{{use: recd.session_parquet, options: {options}}}"
    path = tmp_path / "registry.yaml"
    path.write_text(f"version: 1\ndataset: {dataset}\nconverter: {{use: recd.kjt}}\n")
    source = open_source(path)
    assert (source.keys, source.features) == (SessionKeys("session_id", "ts"), ("seen",))
    assert source.schema.names == ["seen", "price", "label", "session_id", "ts"]
    (partition,) = source.partitions
    for _again in range(2):
        batches = source.read(partition, ["ts"])
        assert [ts.as_py() for rows in batches for ts in rows.data["ts"]] == list(range(ROWS))
