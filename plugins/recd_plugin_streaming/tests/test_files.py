from __future__ import annotations

import os
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.commands import recd, refusal

from recd_plugin_streaming.files import Files
from recd_plugin_streaming.kafka import Kafka
from recd_plugin_streaming.tests.streams import (
    COLUMNS,
    check_each_row_once,
    check_resumed,
    clicks,
    flat,
    read,
    reader,
)
from recd_plugins.runtime.errors import DataError
from recd_plugins.testing.contracts.plugin import PluginContract


def write(folder: Any, name: str, rows: list[Any], **columns: Any) -> None:
    """Write a file that appears when it is complete, with small row groups."""
    table = pa.Table.from_pylist(rows)
    for column, values in columns.items():
        table = table.set_column(table.column_names.index(column), column, pa.array(values))
    pq.write_table(table, folder / f".{name}", row_group_size=13)
    os.replace(folder / f".{name}", folder / name)


def dataset(folder: Any, **options: Any) -> Files:
    values = {"path": str(folder), "columns": COLUMNS, "end": "latest", "poll_seconds": 0.2}
    return Files(Files.Options.model_validate(values | options))


class TestPlugins(PluginContract):
    @pytest.fixture(params=["files", "kafka"])
    def plugin(self, request: pytest.FixtureRequest, tmp_path: Any) -> Any:
        if request.param == "files":
            return dataset(tmp_path)
        values = {"servers": "localhost:9092", "topic": "clicks", "columns": COLUMNS}
        return Kafka(Kafka.Options.model_validate(values))


@pytest.mark.parametrize("grouping", [{}, {"group_by": "session", "window_rows": 50}])
def test_a_resumed_reader_yields_the_other_batches(tmp_path, grouping):
    for part in range(4):
        write(tmp_path, f"{part}.parquet", clicks(50, 50 * part))
    stream = dataset(tmp_path, **grouping)
    states = check_resumed(stream)
    assert states[-1]["done"] == [f"{part}.parquet" for part in range(4)]
    write(tmp_path, "00.parquet", clicks(8, 200))  # a name before those that are trained
    assert sorted(flat(read(reader(stream, state=states[-1]))[0])) == list(range(200, 208))


@pytest.mark.parametrize("grouping", [{}, {"group_by": "session", "window_rows": 40}])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 1), (2, 4), (4, 4)])
def test_each_row_comes_once_if_the_ranks_change(tmp_path, grouping, before, after):
    stream = dataset(tmp_path, **grouping)
    for part, (count, first) in enumerate(((90, 0), (2, 90), (61, 92), (40, 153))):
        write(tmp_path, f"{part}.parquet", clicks(count, first))
    more = partial(write, tmp_path, "later.parquet", clicks(30, 193))
    check_each_row_once(stream, range(3, 3 + before), after, 223, more)


def test_files_are_trained_when_they_are_complete(tmp_path, capfd):
    made = reader(dataset(tmp_path, end="never", order="modified"))
    assert made.poll(0.5) is False
    (tmp_path / "b.parquet").write_bytes(b"PAR1 half")
    (tmp_path / "_temporary.parquet").write_bytes(b"?")
    write(tmp_path, "c.parquet", clicks(8))
    assert made.poll(10) is True
    write(tmp_path, "b.parquet", clicks(8, 8))
    write(tmp_path, "a.parquet", clicks(8, 16))
    os.utime(tmp_path / "a.parquet", (1e9, 1e9))
    batches, _ = read(made, most=3)
    assert sorted(flat(batches)) == list(range(24))
    assert batches[0] == list(range(8))
    assert capfd.readouterr().err.count("The file is trained when it is complete") == 1


def test_places_and_samples(tmp_path):
    write(tmp_path, "a.parquet", clicks(20))
    stream = dataset(tmp_path)
    stream.prepare()
    rows = next(iter(stream.sample(8)))
    assert rows.data.column("id").to_pylist() == list(range(8))
    rows = next(iter(reader(stream)))
    assert rows.place_of(3) == f"{tmp_path}: a.parquet: row 3 (from 0)"


def test_what_is_refused(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        dataset(tmp_path / "nowhere").prepare()
    write(tmp_path, "a.parquet", clicks(20))
    _, states = read(reader(dataset(tmp_path)), most=1)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(DataError, match=r"a.parquet: the file was deleted before all its rows"):
        read(reader(dataset(tmp_path), state=states[0]))
    wrong: list[tuple[str, list[Any], str]] = [
        ("id", [str(n) for n in range(20)], "column 'id' has the type string, expected int64"),
        ("id", [n + 0.5 for n in range(20)], "column 'id' has the type double, expected int64"),
        ("id", [None, *range(19)], r"row 0 \(from 0\): column 'id' is missing or null"),
        ("click", [*[1] * 15, *[2] * 5], r"row 15 \(from 0\): column 'click' is neither 0 nor 1"),
    ]
    for column, values, said in wrong:
        write(tmp_path, "a.parquet", clicks(20), **{column: values})
        with pytest.raises(DataError, match=said):
            read(reader(dataset(tmp_path)))
    write(tmp_path, "a.parquet", [{"id": 1}])
    with pytest.raises(DataError, match="column 'session' is missing"):
        read(reader(dataset(tmp_path)))


REGISTRY = """version: 1
dataset:
  use: streaming.files
  options: {{path: {folder}, columns: {{id: id, session: key, click: label}}}}
converter: {{use: recd.kjt}}
model: {{embedding_dim: 8, num_embeddings: 100}}
training: {{batch_size: 8, device: cpu}}
"""


def test_keys_that_a_stream_does_not_support(tmp_path):
    write(tmp_path, "a.parquet", clicks(20))
    registry = tmp_path / "registry.yaml"
    registry.write_text(REGISTRY.format(folder=tmp_path))
    assert "a stream; size of the tables" in recd("run", registry, "--dry-run")
    said = refusal("run", registry, "training.workers=2", "training.epochs=3", code=1)
    for key in ("training.workers=2", "training.epochs=3"):
        assert f"{key}: dataset 'streaming.files' is a stream, which does not" in said
    vocabulary = "preprocessing: [{use: tables.vocabulary, features: [id], options: {rows: 100}}]"
    registry.write_text(f"{registry.read_text()}{vocabulary}\n")
    assert "cannot all be read before training" in refusal("run", registry, code=1)
