"""No file of a checkpoint runs code, whatever is put into it."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.checkpoint_cases import reseal, save_two
from tests.training.checkpoint_payloads import ODDITIES, Call, payloads
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict_loader import load

from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint import _own
from recd_plugins.training.checkpoint_dcp import (
    SafeLoadPlanner,
    SafeReader,
    read_metadata,
)
from recd_plugins.training.checkpoint_files import (
    DamagedError,
    problems,
    read_progress,
)

NAME = "model.bags.embedding_bags.t.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_on_ranks(save_two, 2, folder)
    return folder / "step-000000002"


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def read(checkpoint: Path) -> torch.Tensor:
    """The table, read as `recd run` reads it."""
    assert problems(checkpoint) == ([], []), "the manifest does not give it away"
    read_progress(checkpoint)
    contents = read_metadata(checkpoint)
    document = {"model": {NAME.removeprefix("model."): torch.zeros(16, 4)}}
    contents.state_dict_metadata = {NAME: contents.state_dict_metadata[NAME]}
    try:
        load(document, storage_reader=SafeReader(checkpoint, contents), planner=SafeLoadPlanner())
    except CheckpointException as error:
        raise (_own(error) or error) from error
    return document["model"][NAME.removeprefix("model.")]


def test_what_is_read_is_what_torch_reads(checkpoint: Path) -> None:
    stock = {"model": {NAME.removeprefix("model."): torch.zeros(16, 4)}}
    load(stock, checkpoint_id=checkpoint)
    assert torch.equal(read(checkpoint), stock["model"][NAME.removeprefix("model.")])
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    found = read_metadata(checkpoint)
    assert found.state_dict_metadata.keys() == metadata.state_dict_metadata.keys()
    assert found.storage_data.keys() == metadata.storage_data.keys()


@pytest.mark.parametrize("kind", payloads(Path("mark")))
def test_metadata_runs_nothing(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    payload = payloads(tmp_path / "ran")[kind]
    (checkpoint / ".metadata").write_bytes(payload)
    reseal(checkpoint)
    with pytest.raises(DamagedError, match=r"\.metadata: names \S+\.\S+, which no checkpoint"):
        read(checkpoint)
    assert not (tmp_path / "ran").exists()
    if "attrgetter" not in kind and "dotted" not in kind:
        pickle.loads(payload)
        assert _appears(tmp_path / "ran"), "the payload would have run"


def _appears(path: Path) -> bool:
    for _ in range(500):
        if path.exists():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("kind", ODDITIES)
def test_metadata_that_is_none(checkpoint: Path, kind: str) -> None:
    (checkpoint / ".metadata").write_bytes(ODDITIES[kind])
    reseal(checkpoint)
    with pytest.raises(DamagedError, match=r"\.metadata: is damaged"):
        read(checkpoint)
    assert "__setstate__" not in vars(dcp.Metadata), "a class of torch was changed"


def change_metadata(checkpoint: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    change(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(checkpoint)


def put(checkpoint: Path, value: Any, as_bytes: bool) -> None:
    """Let the table's first chunk be ``value``, behind what is in its file."""

    def change(metadata: Any) -> None:
        index, info = next(
            (index, info) for index, info in metadata.storage_data.items() if index.fqn == NAME
        )
        path = checkpoint / info.relative_path
        offset = path.stat().st_size
        with path.open("ab") as file:
            torch.save(value, file)
        place = _StorageInfo(info.relative_path, offset, path.stat().st_size - offset)
        if as_bytes:
            metadata.state_dict_metadata[NAME] = dcp.BytesStorageMetadata()
            for chunk in [chunk for chunk in metadata.storage_data if chunk.fqn == NAME]:
                del metadata.storage_data[chunk]
            index = dcp.MetadataIndex(NAME)
        metadata.storage_data[index] = place

    change_metadata(checkpoint, change)


@pytest.mark.parametrize(("as_bytes", "function"), [(False, os.system), (True, eval)])
def test_a_file_of_tensors_runs_nothing(
    checkpoint: Path, tmp_path: Path, as_bytes: bool, function: Any
) -> None:
    command = f"touch {tmp_path / 'ran'}"
    argument = command if function is os.system else f"__import__('os').system({command!r})"
    put(checkpoint, Call(function, argument), as_bytes)
    with pytest.raises(DamagedError, match=r"names a value \(.*, which no"):
        read(checkpoint)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["../other/__0_0.distcp", ".."])
def test_no_file_outside_is_read(checkpoint: Path, path: str) -> None:
    def change(metadata: Any) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == NAME)
        metadata.storage_data[index].relative_path = path

    change_metadata(checkpoint, change)
    with pytest.raises(DamagedError, match=r"\.metadata: is damaged .*outside of the checkpoint"):
        read(checkpoint)


def test_a_tensor_of_another_type_is_not_cast(checkpoint: Path) -> None:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[NAME].properties.dtype = torch.float64

    change_metadata(checkpoint, change)
    with pytest.raises(CheckpointException, match=r"is torch\.float64 there and torch\.float32"):
        read(checkpoint)
