"""A read task for any process: the same blocks whoever makes them, in whatever order."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recd_plugins import RunConfig, load_registry, prepare
from recd_plugins.config import Entry, RegistrySpec
from recd_plugins.data.loader import build_dataloader, read_task
from recd_plugins.data.plain import PlainConverter
from recd_plugins.data.reader import Piece, PlannedReader
from recd_plugins.interfaces import Reader, Rows
from recd_plugins.interfaces.ingestion import BatchBlock, ReadTask, TaskReader
from recd_plugins.model.build import build_model
from recd_plugins.runtime.errors import PluginError
from recd_plugins.testing.contracts.ingestion import Noise, Numbers, Unrepeatable

BATCH = 8

State = dict[str, Any]


class Recorded(Numbers):
    """Says which row groups were read."""

    name = "test.recorded"
    read: ClassVar[list[int]] = []

    def _read(self, pieces: Iterator[Piece]) -> Generator[Rows, None, None]:
        def seen() -> Iterator[Piece]:
            for piece in pieces:
                self.read.append(piece.unit.group)
                yield piece

        yield from super()._read(seen())


class Iterated(Numbers):
    """Its reader has no blocks of its own."""

    name = "test.iterated"

    def reader(self, **options: Any) -> Reader:
        reader = super().reader(**options)
        reader.__class__ = IteratedReader
        return reader


class IteratedReader(PlannedReader):
    num_blocks = Reader.num_blocks  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Rows]:
        for block in super().blocks(0, 1):
            yield from block

    def blocks(self, worker: int, num_workers: int) -> Iterator[Iterator[Rows]]:
        return Reader.blocks(self, worker, num_workers)  # type: ignore[return-value]


class Locked(PlainConverter):
    """Holds what cannot be pickled."""

    name = "test.locked"

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.lock = threading.Lock()


def registry_of(dataset: Numbers, **parts: Any) -> RunConfig:
    spec = {"version": 1, "training": {"batch_size": BATCH}}
    parts = {
        "converter": Unrepeatable(Unrepeatable.Options(trainer=os.getpid())),
        "preprocessing": (Entry(Noise(Noise.Options()), ("item",), "preprocessing[0]", 1),),
        "sharding": (),
        **parts,
    }
    return RunConfig(
        Path("registry.yaml"),
        RegistrySpec.model_validate(spec),
        dataset,
        pooling=(),
        cache=(),
        **parts,
    )


def sparse(batch: Any) -> list[int]:
    return batch.sparse_features.values().tolist()


def alone(
    registry: RunConfig, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[list[int], State]]:
    """Ids and the position after each batch of an epoch, of the rank that reads by itself."""
    loader = build_dataloader(registry, rank, world_size)
    for batch in loader:
        yield sparse(batch), loader.state_dict()


def contents(block: BatchBlock) -> list[tuple[list[int], State]]:
    return [(sparse(batch), position) for batch, position in block.batches]


def start_of(task: ReadTask) -> State:
    reader = Numbers(Numbers.Options()).reader(
        rank=task.rank, world_size=task.world_size, batch_size=BATCH, split=task.split
    )
    return reader.state_dict()


@pytest.fixture(scope="module")
def made() -> tuple[list[tuple[list[int], State]], State, ReadTask, list[TaskReader]]:
    """An epoch of rank 1 of 2, where it starts, and two readers of it."""
    registry = registry_of(Numbers(Numbers.Options()))
    epoch = list(alone(registry, 1, 2))
    task = read_task(registry, 1, 2)
    return epoch, start_of(task), task, [pickle.loads(pickle.dumps(task)).open() for _ in range(2)]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_blocks_in_any_order_by_any_reader_are_the_epoch(made, data):
    """From every position on, each block by either reader."""
    epoch, start, _, readers = made
    taken = data.draw(st.integers(0, len(epoch)), "batches taken")
    position = json.loads(json.dumps(epoch[taken - 1][1] if taken else start))
    num_blocks = readers[0].num_blocks(position)
    assert num_blocks is not None
    blocks = {}
    for number in data.draw(st.permutations(range(num_blocks + 2)), "order"):
        reader = data.draw(st.sampled_from(readers), "reader")
        blocks[number] = reader.block(position, number)
        assert blocks[number].number == number
    end = {**position, "history": [], "epoch": position["epoch"] + 1}
    for number in (num_blocks, num_blocks + 1):
        assert (blocks[number].batches, blocks[number].end) == ([], end)
    in_order = [blocks[number] for number in range(num_blocks)]
    assert all(block.batches and block.end is None for block in in_order)
    assert [batch for block in in_order for batch in contents(block)] == epoch[taken:]


def test_a_block_reads_its_row_groups_alone():
    registry = registry_of(Recorded(Recorded.Options()))
    task = read_task(registry, 0, 1)
    reader, start = task.open(), start_of(task)
    num_blocks = reader.num_blocks(start)
    assert num_blocks is not None
    for number in range(num_blocks):
        Recorded.read.clear()
        assert reader.block(start, number).batches
        assert len(Recorded.read) <= 2, "its own and what completes its last batch"


def test_a_dataset_that_only_iterates():
    """A block is a batch; the number of blocks shows at the end."""
    registry = registry_of(Iterated(Iterated.Options()))
    expected = list(alone(registry))
    task = read_task(registry, 0, 1)
    reader, position = task.open(), expected[1][1]
    assert reader.num_blocks(position) is None
    blocks = [reader.block(position, number) for number in range(len(expected) - 1)]
    assert [contents(block) for block in blocks[:-1]] == [[batch] for batch in expected[2:]]
    assert blocks[-1].batches == []
    assert blocks[-1].end == expected[-1][1] | {"epoch": 1, "history": []}


def test_what_cannot_be_pickled_is_named():
    dataset = Numbers(Numbers.Options())
    with pytest.raises(PluginError, match=r"'_thread.lock'.*__getstate__.*workers: 0"):
        read_task(registry_of(dataset, converter=Locked(Locked.Options())), 0, 1)


REGISTRY = """
version: 1
dataset: {use: recd.session_parquet, options: {path: table.parquet}}
converter: {use: acme.first}
training: {batch_size: 4}
"""

PLUGINS = '''
from recd_plugins.data.plain import PlainConverter
from recd_plugins.config.hookspecs import hookimpl
from recd_plugins.interfaces import DatasetWrapper

class Same(DatasetWrapper):
    """The rows as they are."""
    name = "acme.same"
    def reader(self, **options): return self.inner.reader(**options)

class First(PlainConverter):
    """Plain."""
    name = "acme.first"

@hookimpl
def register_converters(): return [First]

@hookimpl
def register_datasets(): return [Same]
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A table, a registry file that names it by a relative path, and a folder of plugins."""
    columns = {
        "session_id": pa.array(range(16), pa.int64()),
        "ts": pa.array(range(16), pa.int64()),
        "label": pa.array([0] * 16, pa.int8()),
        "seen": pa.array([[row] for row in range(16)], pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(columns), tmp_path / "table.parquet")
    (tmp_path / "registry.yaml").write_text(REGISTRY)
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "acme.py").write_text(PLUGINS)
    (tmp_path / "elsewhere").mkdir()
    return tmp_path


def work_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ReadTask, State]:
    monkeypatch.chdir(folder)
    registry = load_registry("registry.yaml", plugins_dir="plugins")
    return read_task(registry, 0, 1), build_dataloader(registry, 0, 1).state_dict()


def test_relative_paths_are_those_of_the_trainer(folder, monkeypatch):
    task, start = work_in(folder, monkeypatch)
    monkeypatch.chdir(folder / "elsewhere")
    assert contents(task.open().block(start, 0))[0][0] == [0, 1, 2, 3]
    assert Path.cwd() == folder


def test_plugins_that_are_not_there_are_named(folder, monkeypatch):
    task, _ = work_in(folder, monkeypatch)
    renamed = task.pickled.replace(b"recd_plugin_recd", b"recd_plugin_gone")
    with pytest.raises(PluginError, match=r"No module named 'recd_plugin_gone'.*install"):
        replace(task, pickled=renamed).open()


OF_TABLES = '''
from recd_plugins.api import Sharding, TableStrategy, hookimpl

class Part(TableStrategy):
    """Nothing."""

class Parted(Sharding):
    """Has a part."""
    name = "acme.parted"

    def strategy(self, tables, context): return Part() if tables else None

@hookimpl
def register_shardings(): return [Parted]
'''


def test_a_reader_has_the_file_of_a_part_that_wrappers_may_ask(folder, monkeypatch):
    (folder / "plugins" / "acme_tables.py").write_text(OF_TABLES)
    path = "{path: table.parquet}"
    text = REGISTRY.replace(path, f"{path}, wrap: [{{use: acme.same}}]")
    sharding = 'sharding: [{use: acme.parted, tables: ["*"]}]\n'
    sizes = "model: {embedding_dim: 4, num_embeddings: 16, bottom_mlp: [4], top_mlp: [4]}\n"
    (folder / "registry.yaml").write_text(text + sharding + sizes)
    monkeypatch.chdir(folder)
    registry = load_registry("registry.yaml", plugins_dir="plugins")
    prepared = prepare(registry, build_model(registry, registry.dataset.schema()))
    task = read_task(prepared.registry, 0, 1, prepared=prepared)
    start = prepared.dataloader(rank=0, world_size=1).state_dict()
    for name in task.modules:  # as in a process that has not loaded them
        monkeypatch.delitem(sys.modules, name)
    for name in [each for each in sys.modules if each.endswith("_acme_tables")]:
        monkeypatch.delitem(sys.modules, name)
    assert len(contents(task.open().block(start, 0))[0][0]) == 4
