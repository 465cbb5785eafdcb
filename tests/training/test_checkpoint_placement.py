"""A checkpoint goes on wherever its tables live: replicated ones as row-wise ones, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.small_registry import MakeRegistry
from tests.training.job_cases import losses_of_jobs
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint_dcp import read_metadata
from recd_plugins.training.trainer import Job

ROW_WISE, REPLICATED = "torchrec.row_wise", "torchrec.data_parallel"
MODEL = {"embedding_dim": 4, "num_embeddings": 50, "bottom_mlp": [4], "top_mlp": [4]}
TRAINING = {"batch_size": 32, "ranks": 2, "evaluate": False, "learning_rate": 0.1, "eps": 1e-3}


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
        training=TRAINING,
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
