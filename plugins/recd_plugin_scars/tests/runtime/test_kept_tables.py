"""Tables whose files a later run goes on with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugin_scars.runtime.spec import MappedFile, TableCache
from recd_plugin_scars.tests.runtime.kept_cases import contents, fill, lost, moved, sharded
from recd_plugin_scars.tests.runtime.kernels import (
    assert_equal,
    batch_of,
    cached_kernel,
    config_of,
    learn,
    pair,
    state_of,
)
from recd_plugins.distributed.lookup_kernels import close_kernels
from recd_plugins.errors import DataError, RecdError
from recd_plugins.testing.gloo import run_on_ranks

ADAGRAD = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
BATCHES = [batch_of([[0, 1], [6]], [[2], []]), batch_of([[1, 6], [1]], [[9], [2, 3]])]


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def caches(folder: Path) -> dict[str, TableCache]:
    cache = TableCache("lru", 0.5, storage=MappedFile(folder, keep=True))
    return {"t0": cache, "t1": cache}


def test_a_run_goes_on_where_the_one_before_was_closed(tmp_path: Path) -> None:
    config = config_of([10, 12], **ADAGRAD)
    plain, kernel = pair(config, caches(tmp_path))
    for seed, batch in enumerate(BATCHES):
        for module in (plain, kernel):
            learn(module(batch), seed)
        kernel.close()
        kernel.close()
        del kernel
        # New values are not drawn for what was kept.
        kernel = cached_kernel(config, caches(tmp_path))
        assert_equal(state_of(plain), state_of(kernel))
    kernel.close()


@pytest.mark.parametrize("pooled", [True, False])
def test_sharding_a_model_anew_leaves_kept_rows_alone(tmp_path: Path, pooled: bool) -> None:
    first = sharded(tmp_path, pooled)
    table = local_weights(first)
    with torch.no_grad():
        table.copy_(torch.arange(40.0).view(10, 4))
    close_kernels(first)
    second = sharded(tmp_path, pooled)
    assert torch.equal(local_weights(second), torch.arange(40.0).view(10, 4))
    close_kernels(second)


def local_weights(dmp: DistributedModelParallel) -> torch.Tensor:
    (table,) = dmp.state_dict().values()
    weights: torch.Tensor = table.local_shards()[0].tensor
    return weights


@pytest.mark.parametrize("loaded", ["in place", "from another"])
def test_a_kept_table_is_in_use_before_a_state_dict_is_loaded(tmp_path: Path, loaded: str) -> None:
    first = sharded(tmp_path, pooled=True)
    fill(first, 1.0)
    close_kernels(first)
    before = contents(tmp_path)
    second = sharded(tmp_path, pooled=True)
    state = second.state_dict()
    assert contents(tmp_path) == before, "nobody has asked for its rows"
    if loaded == "in place":
        fill(second, 2.0)
    else:
        second.load_state_dict({name: torch.full((10, 4), 2.0) for name in state})
    (manifest,) = tmp_path.glob("*/manifest.json")
    assert json.loads(manifest.read_text())["status"] == "in use"
    close_kernels(second)
    assert json.loads(manifest.read_text())["status"] == "complete"


def test_a_table_that_a_rank_has_lost_its_part_of_is_refused(tmp_path: Path) -> None:
    for said, same in run_on_ranks(lost, 2, tmp_path):
        assert "table t: rank 1 has no rows of an earlier run in " in said
        assert ".rank1.store, and rank 0 has some in " in said
        assert same


def test_a_table_that_another_rank_kept_is_refused(tmp_path: Path) -> None:
    for said, same in run_on_ranks(moved, 2, tmp_path):
        assert "table t: rank 1 has no rows of an earlier run in " in said
        assert ".rank0.store, which this run does not use" in said
        assert same


def test_a_closed_table_is_trained_no_more(tmp_path: Path) -> None:
    kernel = cached_kernel(config_of([10, 12]), caches(tmp_path))
    kernel.close()
    with pytest.raises(RecdError, match="is closed"):
        kernel(BATCHES[0])


def test_files_of_other_tables_with_as_many_rows_are_refused(tmp_path: Path) -> None:
    kernel = cached_kernel(config_of([10, 12]), caches(tmp_path))
    kernel.close()
    (manifest,) = tmp_path.glob("*/manifest.json")
    assert json.loads(manifest.read_text())["shards"] == [
        "t0, rows 0 to 10, columns 0 to 4",
        "t1, rows 0 to 12, columns 0 to 4",
    ]
    before = manifest.read_text()
    with pytest.raises(DataError, match=r"shards is .*t0, rows 0 to 10, .*t0, rows 0 to 12, "):
        cached_kernel(config_of([12, 10]), caches(tmp_path))
    assert manifest.read_text() == before


def test_a_table_that_was_not_closed_is_refused(tmp_path: Path) -> None:
    kernel = cached_kernel(config_of([10, 12]), caches(tmp_path))
    learn(kernel(BATCHES[0]))
    kernel.flush()
    before = [weight.clone() for weight in kernel.split_embedding_weights()]
    del kernel
    with pytest.raises(DataError, match="without closing the table"):
        cached_kernel(config_of([10, 12]), caches(tmp_path))
    (file,) = tmp_path.glob("*/weights")
    assert file.read_bytes() == torch.cat(before).numpy().tobytes()
