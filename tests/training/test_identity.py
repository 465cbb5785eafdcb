from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from recd_plugins import load_registry
from recd_plugins.interfaces.model_tables import tables_of
from recd_plugins.model.build import build_model
from recd_plugins.runtime.errors import RecdError
from recd_plugins.training.checkpoint_files import ALLOWABLE, FREE, IDENTITY
from recd_plugins.training.identity import (
    check_resumable,
    check_same_model,
    identity_of,
    identity_text,
)

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: {folder}/table
    generate: {{rows: 256, row_group_rows: 128}}
converter: {{use: recd.ikjt}}
preprocessing:
  - {{use: recd.first_x, features: ["seq_*"], options: {{x: 5}}}}
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 1000}}}}
pooling:
  - {{use: recd.mean, features: ["seq_*"]}}
sharding:
  - {{use: torchrec.row_wise, tables: [t_item_0]}}
model: {{embedding_dim: 4, num_embeddings: 1000, bottom_mlp: [4], top_mlp: [4]}}
training: {{batch_size: 32, learning_rate: 0.1, checkpoint: {{path: checkpoints}}}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("identity")
    registry(folder).dataset.prepare()
    return folder


def registry(folder: Path, *changes: tuple[str, str]) -> Any:
    text = REGISTRY.format(folder=folder)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "registry.yaml"
    path.write_text(text, encoding="utf-8")
    return load_registry(path)


def identity(folder: Path, *changes: tuple[str, str]) -> dict[str, Any]:
    found = registry(folder, *changes)
    return identity_of(found, tables_of(build_model(found, found.dataset.schema())))


@pytest.fixture
def checkpoint(folder: Path, tmp_path: Path) -> Path:
    (tmp_path / IDENTITY).write_text(identity_text(identity(folder)), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{use: recd.ikjt}", "{use: recd.ikjt, options: {compare: auto, groups: auto}}"),
        ("learning_rate: 0.1", "learning_rate: 0.1, dense_learning_rate: 0.1, eps: 1.0e-8"),
        ("learning_rate: 0.1", "learning_rate: 0.1, dense_optimizer: adagrad"),
        ('["seq_*"], options: {x: 5}', "[seq_0_*, seq_1_*, seq_2_*], options: {x: 5}"),
    ],
)
def test_defaults_may_be_spelled_out(folder: Path, checkpoint: Path, old: str, new: str) -> None:
    assert check_resumable(checkpoint, identity(folder, (old, new)), ()) == []


REFUSED = {
    "preprocessing[1].options.buckets was 1000 and is now 500": ("buckets: 1000", "buckets: 500"),
    "model.embedding_dim was 4 and is now 8": ("embedding_dim: 4", "embedding_dim: 8"),
    "training.learning_rate was 0.1 and is now 0.2": ("learning_rate: 0.1", "learning_rate: 0.2"),
    "training.seed was 0 and is now 1": ("learning_rate: 0.1", "learning_rate: 0.1, seed: 1"),
    'training.dense_optimizer was not set and is now "adam"': (
        "learning_rate: 0.1", "learning_rate: 0.1, dense_optimizer: adam",
    ),
    'pooling[0].use was "recd.mean" and is now "recd.attention"': ("recd.mean", "recd.attention"),
    'converter.use was "recd.ikjt" and is now "recd.kjt"': ("recd.ikjt", "recd.kjt"),
    "dataset.options.shuffle was false and is now true": (
        "generate:", "shuffle: true\n    generate:",
    ),
    'dataset.wrap[0].use was not set and is now "scars.hot_batches"': (
        "converter:", "  wrap: [{use: scars.hot_batches}]\nconverter:",
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_makes_it_another_run_is_refused(folder: Path, checkpoint: Path, words: str) -> None:
    old, new = REFUSED[words]
    now = identity(folder, (old, new))
    with pytest.raises(RecdError) as caught:
        check_resumable(checkpoint, now, ())
    said = str(caught.value)
    assert said.startswith(f"{checkpoint}: the checkpoint belongs to another run: ")
    assert words in said
    allowable = [name for name in ALLOWABLE if words.startswith(name)]
    for name in allowable:
        assert f"--allow {name}" in said
        assert any(words in told for told in check_resumable(checkpoint, now, ALLOWABLE))
    if not allowable:
        with pytest.raises(RecdError):
            check_resumable(checkpoint, now, ALLOWABLE)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("batch_size: 32", "batch_size: 32, ranks: 4", "training.ranks was 1 and is now 4"),
        ("torchrec.row_wise", "torchrec.data_parallel", "sharding[0].use was"),
        ("sharding:", "cache: [{use: scars.cache, tables: [t_usr_0]}]\nsharding:",
         'cache[0].use was not set and is now "scars.cache"'),
    ],
)  # fmt: skip
def test_changes_are_told(folder: Path, checkpoint: Path, old: str, new: str, told: str) -> None:
    now = identity(folder, (old, new))
    assert any(told in each for each in check_resumable(checkpoint, now, ()))


def test_a_table_that_moved_or_changed(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder / "table", moved)
    change = f"path: {folder}/table", f"path: {moved}"
    assert check_resumable(checkpoint, identity(folder, change), ()) == []
    (file,) = moved.glob("*.parquet")
    table = pq.read_table(file)
    pq.write_table(table, file, row_group_size=128)
    generate = "    generate: {rows: 256, row_group_rows: 128}\n", ""
    with pytest.raises(RecdError, match=rf"data\.train\.{file.name}\.footer was "):
        check_resumable(checkpoint, identity(folder, change, generate), ALLOWABLE)


def test_ids_of_another_kind_make_another_model(folder: Path, tmp_path: Path) -> None:
    mine = {**identity(folder), "kinds": {"user": "text", "item": "numbers"}}
    (tmp_path / IDENTITY).write_text(identity_text(mine), encoding="utf-8")
    assert check_same_model(tmp_path, {**mine, "kinds": {}})
    with pytest.raises(RecdError, match=r"the type of column 'user' was .text. and is now"):
        check_same_model(tmp_path, {**mine, "kinds": {"user": "numbers", "item": "numbers"}})
    (tmp_path / IDENTITY).write_text(identity_text({**mine, "kinds": {}}), encoding="utf-8")
    assert check_same_model(tmp_path, mine)


def test_fields_are_those_that_there_are(folder: Path) -> None:
    in_16_bits = ("learning_rate: 0.1", "learning_rate: 0.1, wire: fp16")  # else it is left out
    flat = json.loads(identity_text(identity(folder, in_16_bits)))
    for field in (*FREE, *ALLOWABLE):
        if field.startswith("dataset.options."):  # only early checkpoints have it
            continue
        value = flat
        for part in field.split("."):
            assert part in value, field
            value = value[part]
