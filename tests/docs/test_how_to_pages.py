"""The models of docs/how-to train as the page says: pipelined, and the same without duplicates."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.shaped_network import unavailable
from hypothesis import settings
from tests.docs import how_to_cases as cases
from tests.docs.pages import DOCS, blocks
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugins import load_registry
from recd_plugins.runtime.launch import launch
from recd_plugins.testing.fake_device import fake_device
from recd_plugins.testing.gloo import run_on_ranks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_runs_as_one_program(folder: Path) -> None:
    registry, _pooling = cases.blocks("yaml")
    (folder / "registry.yaml").write_text(registry)
    exec(compile("\n".join(cases.blocks("python")), "your_model.md", "exec"), {})


@pytest.mark.skipif(
    settings.get_current_profile_name() != "nightly" or unavailable() is not None,
    reason="starts torchrun on three nodes, by night",
)
def test_hosts_on_one_machine(folder: Path) -> None:
    _, code = blocks((DOCS / "how-to" / "cluster.md").read_text(encoding="utf-8"), "python")
    (folder / "program.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(DOCS.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("exit codes [0, 0, 0], ")


@pytest.mark.parametrize("model", ["PooledModel", "SequenceModel", "GruModel"])
def test_the_model_trains_on_ranks_as_without_deduplication(folder: Path, model: str) -> None:
    registry, pooling = cases.blocks("yaml")
    registry = registry.replace("path: table", f"path: {folder}/table")
    registry = registry.replace("batch_size: 256", "batch_size: 256, optimizer: sgd")
    if model == "SequenceModel":
        registry += pooling
    losses = {}
    for converter in ("recd.ikjt", "recd.kjt", "recd.partial_ikjt"):
        path = folder / f"{converter}.yaml"
        path.write_text(registry.replace("recd.ikjt", converter))
        load_registry(path).dataset.prepare()
        losses[converter] = run_on_ranks(cases.losses_of, 2, path, model)
    assert [len(of_rank) for of_rank in losses["recd.kjt"]] == [4, 4]
    for converter in ("recd.ikjt", "recd.partial_ikjt"):
        for rank in range(2):
            assert losses[converter][rank] == pytest.approx(losses["recd.kjt"][rank], abs=1e-6)


def test_a_batch_of_empty_sequences_is_pooled_to_zeros() -> None:
    """As the last batch of a rank may be: of few rows, none with an id."""
    values = torch.empty(0, 8, requires_grad=True)
    rows = JaggedTensor(values, lengths=torch.zeros(3, dtype=torch.int64))
    pooled = cases.models()["GruPooling"]().pool(rows)
    assert torch.equal(pooled, torch.zeros(3, 8))
    pooled.sum().backward()  # or this rank would leave the others alone in their backward pass
    assert values.grad is not None


def mean_elsewhere(rank: int, world_size: int) -> list[list[float]]:
    mean = cases.models()["Mean"]()
    with fake_device() as device:
        values, lengths = torch.ones(3, 8).to(device), torch.tensor([2, 0, 1]).to(device)
        pooled: list[list[float]] = mean(JaggedTensor(values, lengths=lengths)).tolist()
    return pooled


def test_the_mean_of_the_page_mixes_no_devices() -> None:
    assert launch(mean_elsewhere, 1) == [[[1.0] * 8, [0.0] * 8, [1.0] * 8]]
