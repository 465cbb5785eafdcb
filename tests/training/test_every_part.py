"""Every part that trains does so as stock TorchRec, in a run: on the CPU, or a GPU of the tests.

Parts are those that are installed, not those that a list here remembers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.small_registry import MakeRegistry
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from recd_plugins.config.manager import PluginManager
from recd_plugins.testing.device import DEVICE
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint_dcp import read_metadata
from recd_plugins.training.trainer import Job, train

TRAINING: dict[str, Any] = {
    "batch_size": 64,
    "steps": 6,
    "ranks": 1,
    "evaluate": False,
    "device": DEVICE.type,
}
#: Of parts that need some, and of those that would do nothing without.
OPTIONS: dict[str, dict[str, Any]] = {
    "recd.din": {"target": "item_0"},
    "recd.target_attention": {"target": "item_0"},
    "scars.cache": {"share": 0.3},
    "torchrec.uvm": {"load_factor": 0.3},
}
RATE = {"learning_rate": 0.01}
#: Those that are for sequences alone.
TABLES = {"flexshard.two_tier": ["t_seq_*"], "flexshard.joint": ["t_seq_*"]}
#: Of several nodes, which these tests have not, and with initial rows in the order of new ids.
OTHERS = {"flexshard.three_tier", "dynamic.table"}
# Sums of gradients are in any order on a GPU.
TOLERANCE = 1e-5 if DEVICE.type == "cuda" else 1e-6


def installed(kind: str) -> list[str]:
    return sorted(PluginManager().plugins[kind].keys() - OTHERS)


CASES: dict[str, dict[str, Any]] = {
    **{name: {"converter": {"use": name}} for name in installed("converter")},
    **{name: {"pooling": [{"use": name, "features": ["seq_*"]}]} for name in installed("pooling")},
    **{
        name: {kind: [{"use": name, "tables": TABLES.get(name, ["t_*"])}]}
        for kind in ("sharding", "cache")
        for name in installed(kind)
    },
    **{
        name: {"optimizers": [{"use": name, "tables": ["t_*"], "options": RATE}]}
        for name in installed("optimizer")
    },
    **{name: {"pipeline": {"use": name}} for name in installed("pipeline")},
    "partial IKJTs in tiers": {
        "converter": {"use": "recd.partial_ikjt"},
        "sharding": [{"use": "flexshard.two_tier", "tables": ["t_seq_*"]}],
    },
    # Its rows have a sum of squares for each part of their columns.
    "torchrec.column_wise": {
        "sharding": [{"use": "torchrec.column_wise", "tables": ["t_*"]}],
        "training": {**TRAINING, "optimizer": "sgd"},
    },
    "ids sent once, cached": {
        "sharding": [
            {"use": "torchrec.row_wise", "tables": ["t_*"], "options": {"coalesce": True}}
        ],
        "cache": [{"use": "scars.cache", "tables": ["t_seq_*"]}],
    },
}


def sections_of(case: str) -> dict[str, Any]:
    sections = {"training": TRAINING, **CASES[case]}
    for section in sections.values():
        for entry in section if isinstance(section, list) else [section]:
            if entry.get("use") in OPTIONS:
                entry.setdefault("options", OPTIONS[entry["use"]])
    return sections


#: Losses of stock TorchRec, which are the same under each converter, sharding, cache and pipeline.
STOCK: dict[str, Any] = {}


@pytest.mark.parametrize("case", CASES)
def test_a_run_trains_as_stock_torchrec(case: str, make_registry: MakeRegistry) -> None:
    sections = sections_of(case)
    path = make_registry(**sections).path
    model = repr([sections.get(name) for name in ("pooling", "optimizers", "training")])
    if model not in STOCK:
        job = Job(path, "baseline", device=DEVICE.type)
        ((STOCK[model],),) = run_on_ranks(losses_of_jobs, 1, [job])
    ((ours,),) = run_on_ranks(losses_of_jobs, 1, [Job(path, device=DEVICE.type)])
    if isinstance(ours, str):
        assert DEVICE.type == "cpu"
        assert re.search("CUDA|on cpu|no CPU kernels", ours), ours
    else:
        assert ours == pytest.approx(STOCK[model], rel=TOLERANCE, abs=TOLERANCE)


ROW_WISE, REPLICATED = "torchrec.row_wise", "torchrec.data_parallel"
MODEL = {"embedding_dim": 4, "num_embeddings": 50, "bottom_mlp": [4], "top_mlp": [4]}
OF_TWO = {"batch_size": 32, "ranks": 2, "evaluate": False, "learning_rate": 0.1, "eps": 1e-3}


@pytest.mark.parametrize(
    ("first", "optimizer"), [(ROW_WISE, "rowwise_adagrad"), (REPLICATED, "sgd")]
)
def test_replicated_and_row_wise(
    make_registry: MakeRegistry, tmp_path: Path, first: str, optimizer: str
) -> None:
    tables = ["t_usr_0", "t_usr_1", "t_seq_0_0"], ["t_item_0"]
    path = make_registry(
        preprocessing=[{"use": "recd.sigrid_hash", "features": ["*"], "options": {"buckets": 50}}],
        pooling=[{"use": "recd.mean", "features": ["seq_*"]}],
        sharding=[{"use": ROW_WISE, "tables": each} for each in tables],
        model=MODEL,
        training=OF_TWO,
    ).path
    second = REPLICATED if first == ROW_WISE else ROW_WISE

    def job(sharding: str, folder: str, steps: int) -> Job:
        checkpoint = {"path": str(tmp_path / folder), "keep": 9}
        overrides = {"steps": steps, "optimizer": optimizer, "checkpoint": checkpoint}
        return Job(path, overrides=overrides, sharding=sharding)

    (tmp_path / "stays").mkdir()
    (tmp_path / "moves").mkdir()
    jobs = [job(first, "stays", 6)]
    jobs += [job(first, "moves", 2), job(second, "moves", 4), job(first, "moves", 6)]
    stays, *_, moves = run_on_ranks(losses_of_jobs, 2, jobs)[0]
    assert len(moves) == 6
    assert moves == pytest.approx(stays, abs=1e-6)
    assert len(set(moves)) == 6

    entries = [
        {
            name: (str(each.properties.dtype), each.size)
            for name, each in read_metadata(folder).state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }
        for folder in (tmp_path / "moves" / f"step-00000000{step}" for step in (2, 4))
    ]
    assert entries[0] == entries[1], "names and sizes are the same wherever tables live"
    assert "model.bags.embedding_bags.t_usr_0.weight" in entries[0]


def losses_of_jobs(rank: int, world_size: int, jobs: list[Job]) -> list[list[float] | str]:
    def losses(job: Job) -> list[float] | str:
        try:
            return train(rank, world_size, job).losses
        except Exception as error:  # of FBGEMM, too
            return str(error)

    return [losses(job) for job in jobs]
