"""Pickles that run a command as they are unpickled, each in another way."""

from __future__ import annotations

import json
import operator
import os
import pickle
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commands import invoke
from tests.training.checkpoint_cases import Trainer, change_metadata, flip, reseal, save_two
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict_loader import load

from recd_plugins.runtime.errors import RecdError
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint import Checkpoints, _own
from recd_plugins.training.checkpoint_dcp import SafeLoadPlanner, SafeReader, read_metadata
from recd_plugins.training.checkpoint_files import (
    MANIFEST,
    DamagedError,
    problems,
    read_manifest,
    read_progress,
    sealed,
)


class Call:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def payloads(mark: Path) -> dict[str, bytes]:
    command = f"touch {mark}"
    text = command.encode()
    code = f"__import__('os').system({command!r})"
    getter = Call(operator.attrgetter, "system")
    return {
        "os.system": pickle.dumps(Call(os.system, command)),
        "os.system, protocol 0": pickle.dumps(Call(os.system, command), 0),
        "eval": pickle.dumps(Call(eval, code)),
        "subprocess": pickle.dumps(Call(subprocess.Popen, ["touch", str(mark)])),
        "an attrgetter": pickle.dumps([getter, Call(os.system, command)]),
        "getattr": b"cbuiltins\ngetattr\n(cos\nsystem\nS'__call__'\ntR(S'" + text + b"'\ntR.",
        "opcode INST": b"(S'" + text + b"'\nios\nsystem\n.",
        "a dotted name in a module that is allowed": b"\x80\x04\x8c\x05torch\x8c\x17serialization"
        b".os.system\x93\x8c" + bytes([len(text)]) + text + b"\x85R.",
    }


#: Pickles that name nothing bad, and are none that a checkpoint has.
ODDITIES = {
    "cut off": pickle.dumps(list(range(100)))[:-9],
    "a class and its attributes": b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    b"(N(dS'__setstate__'\nI1\nstb.",
    "other values": pickle.dumps({"state_dict_metadata": {}}),
}


TABLE = "bags.embedding_bags.t.weight"
NAME = f"model.{TABLE}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_on_ranks(save_two, 2, folder)
    return folder


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    name = "step-000000002"
    return Path(shutil.copytree(saved / name, tmp_path / name))


def read(checkpoint: Path) -> torch.Tensor:
    assert problems(checkpoint) == ([], []), "the manifest does not give it away"
    read_progress(checkpoint)
    contents = read_metadata(checkpoint)
    document = {"model": {TABLE: torch.zeros(16, 4)}}
    contents.state_dict_metadata = {NAME: contents.state_dict_metadata[NAME]}
    try:
        load(document, storage_reader=SafeReader(checkpoint, contents), planner=SafeLoadPlanner())
    except CheckpointException as error:
        raise (_own(error) or error) from error
    return document["model"][TABLE]


def test_what_is_read_is_what_torch_reads(checkpoint: Path) -> None:
    stock = {"model": {TABLE: torch.zeros(16, 4)}}
    load(stock, checkpoint_id=checkpoint)
    assert torch.equal(read(checkpoint), stock["model"][TABLE])
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    found = read_metadata(checkpoint)
    assert found.state_dict_metadata.keys() == metadata.state_dict_metadata.keys()
    assert found.storage_data.keys() == metadata.storage_data.keys()


@pytest.mark.parametrize("kind", payloads(Path("mark")))
def test_metadata_runs_nothing(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    payload = payloads(tmp_path / "ran")[kind]
    (checkpoint / ".metadata").write_bytes(payload)
    reseal(checkpoint)
    with pytest.raises(DamagedError, match=r"\.metadata: the file contains class \S+\.\S+, which"):
        read(checkpoint)
    assert not (tmp_path / "ran").exists()
    if "attrgetter" not in kind and "dotted" not in kind:
        pickle.loads(payload)
        deadline = time.monotonic() + 5
        while not (tmp_path / "ran").exists():
            assert time.monotonic() < deadline, "the payload would have run"
            time.sleep(0.01)


@pytest.mark.parametrize("kind", ODDITIES)
def test_metadata_that_is_none(checkpoint: Path, kind: str) -> None:
    (checkpoint / ".metadata").write_bytes(ODDITIES[kind])
    reseal(checkpoint)
    with pytest.raises(DamagedError, match=r"\.metadata: the file is damaged"):
        read(checkpoint)
    assert "__setstate__" not in vars(dcp.Metadata), "a class of torch was changed"


def put(checkpoint: Path, value: Any, as_bytes: bool) -> None:
    """Let the table's first chunk be ``value``, behind what is in its file."""

    def change(metadata: Any) -> None:
        found = (pair for pair in metadata.storage_data.items() if pair[0].fqn == NAME)
        index, info = next(found)
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
def test_files_run_nothing(checkpoint: Path, tmp_path: Path, as_bytes: bool, function: Any) -> None:
    command = f"touch {tmp_path / 'ran'}"
    argument = command if function is os.system else f"__import__('os').system({command!r})"
    put(checkpoint, Call(function, argument), as_bytes)
    with pytest.raises(DamagedError, match=r"an object that torch\.load"):
        read(checkpoint)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["../other/__0_0.distcp", ".."])
def test_no_file_outside_is_read(checkpoint: Path, path: str) -> None:
    def change(metadata: Any) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == NAME)
        metadata.storage_data[index].relative_path = path

    change_metadata(checkpoint, change)
    message = r"\.metadata: the file is damaged .*outside of the checkpoint"
    with pytest.raises(DamagedError, match=message):
        read(checkpoint)


def test_a_tensor_of_another_type_is_not_cast(checkpoint: Path) -> None:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[NAME].properties.dtype = torch.float64

    change_metadata(checkpoint, change)
    message = r"is torch\.float64 in the checkpoint, but torch\.float32"
    with pytest.raises(CheckpointException, match=message):
        read(checkpoint)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


@pytest.mark.parametrize(
    "name", [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "progress.json"]
)
def test_every_flipped_bit_is_noticed(saved: Path, name: str) -> None:
    path = saved / "step-000000002" / name
    whole = path.read_bytes()
    places = random.Random(name)
    for _ in range(12):
        place = places.random()
        flip(path, place)
        try:
            damage, extra = problems(path.parent)
        finally:
            path.write_bytes(whole)
        assert damage, f"bit at {place} of {name}"
        assert str(path) in damage[0]
        assert not extra
    assert problems(path.parent) == ([], [])


def test_a_manifest_of_a_later_version(folder: Path) -> None:
    path = folder / "step-000000002" / MANIFEST
    path.write_text(sealed({"format": 3, "files": {}}), encoding="utf-8")
    with pytest.raises(RecdError, match="the checkpoint has format 3") as caught:
        read_manifest(path.parent)
    assert not isinstance(caught.value, DamagedError), "an older one is no substitute"


recd = partial(invoke, "checkpoint")


def test_verify_names_what_is_missing_cut_short_changed_or_too_much(folder: Path) -> None:
    good = recd("verify", folder)
    assert good.exit_code == 0, good.output
    assert good.stdout.count("bytes, ok\n") == 2

    newest = folder / "step-000000002"
    (newest / "__1_0.distcp").unlink()
    (newest / "progress.json").write_text("{}", encoding="utf-8")
    (newest / "notes.txt").write_text("", encoding="utf-8")
    (newest / ".metadata").unlink()
    (newest / ".metadata").symlink_to(folder / "step-000000001" / ".metadata")
    bad = recd("verify", newest)
    assert bad.exit_code == 1
    lines = bad.stderr.splitlines()
    assert f"{newest}/__1_0.distcp: the file is missing" in lines
    assert f"{newest}/notes.txt: the file is not part of this checkpoint" in lines
    assert f"{newest}/.metadata: the file cannot be read (not a regular file)" in lines
    assert any("progress.json: the file has 2 bytes instead of" in line for line in lines)
    assert recd("list", folder).exit_code == 1

    flip(folder / "step-000000001" / "__0_0.distcp", 0.5)
    assert "ok" in recd("list", folder / "step-000000001").stdout, "it reads no file"
    report = recd("verify", folder / "step-000000001", "--json")
    assert report.exit_code == 1
    ((told,),) = [each["damage"] for each in json.loads(report.stdout)["checkpoints"]]
    assert "__0_0.distcp: the content of the file has changed" in told


def test_show(folder: Path) -> None:
    shown = json.loads(recd("show", folder, "--json").stdout)
    assert shown["step"] == 2
    assert shown["tensors"][NAME] == {"shape": [16, 4], "dtype": "float32"}
    assert "step 2, epoch 0" in recd("show", folder).stdout
    flip(folder / "step-000000002" / ".metadata", 0.5)
    refused = recd("show", folder)
    assert refused.exit_code == 1
    assert ".metadata: the content of the file has changed" in refused.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"step": 2, "losses": [NaN, 1]}', "losses.0 Input should be a finite number"),
        ('{"step": 2, "losses": [1]}', "losses has 1 values, but step is 2"),
        ('{"step": 3}', "Rename the folder to step-000000003"),
    ],
)
def test_progress_that_cannot_be(folder: Path, text: str, told: str) -> None:
    checkpoint = folder / "step-000000002"
    (checkpoint / "progress.json").write_text(text, encoding="utf-8")
    reseal(checkpoint)
    with pytest.raises(DamagedError, match=rf"progress\.json: .*{told}"):
        read_progress(checkpoint)


def load_each(rank: int, world_size: int, folders: list[Path]) -> list[str]:
    trainer = Trainer(world_size)
    said = []
    for folder in folders:
        try:
            progress = Checkpoints(folder, keep=1).load(trainer.dmp, trainer.optimizer)
            said.append(f"step {progress.step}")
        except RecdError as error:
            said.append(str(error))
    return said


def test_a_damaged_one_falls_back_to_the_one_before(saved: Path, tmp_path: Path) -> None:
    one, none, gone = (
        Path(shutil.copytree(saved, tmp_path / name)) for name in ("one", "none", "gone")
    )
    flip(one / "step-000000002" / "__1_0.distcp", 0.5)
    flip(none / "step-000000002" / "__0_0.distcp", 0.5)
    flip(none / "step-000000001" / "progress.json", 0.5)
    (gone / "step-000000002" / MANIFEST).unlink()
    first, second = run_on_ranks(load_each, 2, [one, none, gone])
    assert first == second
    assert first[0] == first[2] == "step 1"
    assert "all checkpoints are damaged" in first[1]
    assert "step-000000002/__0_0.distcp: the content" in first[1]
    assert "step-000000001/progress.json: the content" in first[1]
    names = {folder.name: sorted(path.name for path in folder.iterdir()) for folder in (one, none)}
    assert names["one"] == ["step-000000001", "step-000000002.damaged-1"]
    assert names["none"] == ["step-000000001", "step-000000002"], "nothing is touched"
