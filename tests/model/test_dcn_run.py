"""A DCN trains with everything a DLRM trains with, and to the same losses whatever that is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from recd_plugins import load_registry
from recd_plugins.planning.compute import measure_compute
from recd_plugins.runtime.errors import RecdError
from recd_plugins.training.result import Result
from recd_plugins.training.session import session
from recd_plugins.training.trainer import Job

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: {folder}/table
    sparse: [usr_0, usr_1, usr_2, item_0, "seq_0_*"]
    generate: {{rows: 512, row_group_rows: 128}}
converter: {{use: recd.ikjt}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 500}}}}
pooling:
  - {{use: recd.attention, features: ["seq_*"]}}
sharding:
  - {{use: torchrec.row_wise, tables: [t_usr_0], options: {{coalesce: true}}}}
  - {{use: torchrec.data_parallel, tables: [t_usr_1]}}
  - use: flexshard.two_tier
    tables: ["t_seq_*"]
    options: {{budget: 3x, minimise: bytes, memory_multiplier: 1}}
cache:
  - {{use: scars.cache, tables: [t_usr_2], options: {{policy: lru, share: 0.4}}}}
model:
  {{architecture: {architecture}, embedding_dim: 8, num_embeddings: 500, top_mlp: [16],
    bag_pooling: mean{options}}}
training: {{batch_size: 32, ranks: 2, steps: 5, evaluate: false, checkpoint: {checkpoint}}}
"""


def registry(
    folder: Path, architecture: str = "dcn", options: str = "", checkpoint: str = "{}"
) -> Path:
    path, given = folder / f"{architecture}.yaml", {"options": options, "checkpoint": checkpoint}
    text = REGISTRY.format(folder=folder, architecture=architecture, **given)
    path.write_text(text, encoding="utf-8")
    return path


def train(path: Path, side: Any, overrides: Mapping[str, Any], *, resume: bool = False) -> Result:
    with session(Job(path, overrides=overrides), resume=resume) as trainer:
        return trainer.train(side)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dcn")


def test_with_plugins_and_resumed_it_is_the_plain_run(folder: Path) -> None:
    plain = train(registry(folder), "baseline", {})
    checkpoint = f"{{path: {folder}/checkpoints, every: 2}}"
    path = registry(folder, checkpoint=checkpoint)
    train(path, "plugins", {"steps": 3})
    resumed = train(path, "plugins", {}, resume=True)
    assert resumed.losses == pytest.approx(plain.losses, abs=1e-6)
    assert len(set(plain.losses)) == 5

    path = registry(folder, "dlrm", checkpoint=checkpoint)
    with pytest.raises(RecdError, match=r"model.architecture was \"dcn\" and is"):
        train(path, "plugins", {}, resume=True)


@pytest.mark.parametrize(
    ("options", "flops"),
    [(", cross_net: full", lambda width: width**2), (", low_rank_dim: 4", lambda width: 8 * width)],
)
def test_its_cross_layers_are_counted_as_products(folder: Path, options: str, flops: Any) -> None:
    """Two operations a factor pair, forward and, of input and weights, backward."""
    found = []
    for layers in (1, 3):
        path = registry(folder, options=f"{options}, cross_layers: {layers}")
        load_registry(path).dataset.prepare()
        found.append(measure_compute(load_registry(path)))
    width = 8 * (len(load_registry(path).dataset.schema().sparse) + 1)
    added = (found[1].rest.matmul_flops - found[0].rest.matmul_flops) / 2
    assert added == pytest.approx(3 * 2 * flops(width))
    of_layer = 4 * (flops(width) + width)
    assert found[1].parameter_bytes - found[0].parameter_bytes == 2 * of_layer
