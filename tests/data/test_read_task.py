from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.number_rows import Noise, Numbers, Unrepeatable
from tests.plugin_files import write_plugins
from tests.small_registry import write_registry

from recd_plugins import RunConfig, load_registry
from recd_plugins.config import Entry, RegistrySpec
from recd_plugins.data.loader import build_dataloader, read_task
from recd_plugins.interfaces.ingestion import BatchBlock, TaskReader

BATCH = 8

State = dict[str, Any]


def sparse(batch: Any) -> list[int]:
    return batch.sparse_features.values().tolist()


def alone(registry: RunConfig, rank: int, world_size: int) -> Iterator[tuple[list[int], State]]:
    loader = build_dataloader(registry, rank, world_size)
    for batch in loader:
        yield sparse(batch), loader.state_dict()


def contents(block: BatchBlock) -> list[tuple[list[int], State]]:
    return [(sparse(batch), position) for batch, position in block.batches]


@pytest.fixture(scope="module")
def made() -> tuple[list[tuple[list[int], State]], State, list[TaskReader]]:
    registry = RunConfig(
        Path("registry.yaml"),
        RegistrySpec.model_validate({"version": 1, "training": {"batch_size": BATCH}}),
        Numbers(Numbers.Options()),
        converter=Unrepeatable(Unrepeatable.Options(trainer=os.getpid())),
        preprocessing=(Entry(Noise(Noise.Options()), ("item",), "preprocessing[0]", 1),),
        sharding=(),
        pooling=(),
        cache=(),
    )
    epoch = list(alone(registry, 1, 2))
    task = read_task(registry, 1, 2)
    start = registry.dataset.reader(rank=1, world_size=2, batch_size=BATCH, split="train")
    readers = [pickle.loads(pickle.dumps(task)).open() for _ in range(2)]
    return epoch, start.state_dict(), readers


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_blocks_in_any_order_by_any_reader_are_the_epoch(made, data):
    epoch, start, readers = made
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


PLUGINS = '''
from recd_plugins.data.plain import PlainConverter

class First(PlainConverter):
    """Plain."""
    name = "acme.first"
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    columns = {
        "session_id": pa.array(range(16), pa.int64()),
        "ts": pa.array(range(16), pa.int64()),
        "label": pa.array([0] * 16, pa.int8()),
        "seen": pa.array([[row] for row in range(16)], pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(columns), tmp_path / "table.parquet")
    options = {"path": "table.parquet"}
    write_registry(
        tmp_path,
        dataset={"use": "recd.session_parquet", "options": options},
        converter={"use": "acme.first"},
    )
    write_plugins(tmp_path, PLUGINS, "First")
    (tmp_path / "elsewhere").mkdir()
    return tmp_path


def test_relative_paths_are_those_of_the_trainer(folder, monkeypatch):
    monkeypatch.chdir(folder)
    registry = load_registry("registry.yaml", plugins_dir="plugins")
    task, start = read_task(registry, 0, 1), build_dataloader(registry, 0, 1).state_dict()
    monkeypatch.chdir(folder / "elsewhere")
    assert contents(task.open().block(start, 0))[0][0] == list(range(16))
    assert Path.cwd() == folder
