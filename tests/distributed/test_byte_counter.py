from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from tests.distributed import byte_cases as cases
from tests.distributed.parity_model import NUM_STEPS, make_batch
from torch import nn

from recd_plugins.sharding.byte_counter import CollectiveBytes, lookup_ids
from recd_plugins.sparse import InverseKeyedJaggedTensor
from recd_plugins.testing.gloo import run_on_ranks


def test_every_collective_against_hand_computed_bytes() -> None:
    results = run_on_ranks(cases.collectives, 4)
    for rank, counted in enumerate(results):
        splits = [1, 2, 3, 4]
        to_others = 4 * (10 - splits[rank])
        assert counted == {
            "all_to_all_single": (to_others, 1),
            "all_to_all_single even": (4 * 6, 1),
            "all_to_all_single int64 rows": (8 * 3 * 3, 1),
            "functional all_to_all": (to_others, 1),
            "reduce_scatter_tensor": (4 * 6, 1),
            "reduce_scatter": (4 * 6, 1),
            "torchrec reduce_scatter": (4 * 6, 1),
            "all_gather_into_tensor": (4 * 10 * 3, 1),
            "all_gather": (4 * 10 * 3, 1),
            "all_reduce": (2 * 4 * 8 * 3 // 4, 1),
            "functional all_reduce": (2 * 4 * 8 * 3 // 4, 1),
            "broadcast": (4 * 10 * 3 if rank == 1 else 0, 1),
            "reduce": (0 if rank == 1 else 4 * 10, 1),
            "scatter": (4 * 10 * 3 if rank == 1 else 0, 1),
            "send": (4 * 10, 1) if rank % 2 else (0, 0),
            "barrier": (0, 0),
        }


# Each of two ranks has 3 rows with 5 ids of one feature; embeddings are 4 floats of 4 bytes.
ROW = 4 * 4


def test_table_wise_bytes() -> None:
    owner, other = run_on_ranks(cases.table_wise_bags, 2, "table_wise")
    # Ids: rank 1 sends rank 0 its 3 lengths and 5 values, of 8 bytes, and each tells the other
    # how many of both and its batch size come.
    sizes = 3 * 8
    assert owner["all_to_all", "forward", "integers", "bytes"] == sizes
    assert other["all_to_all", "forward", "integers", "bytes"] == sizes + (3 + 5) * 8
    # Embeddings: rank 0 sends rank 1 its 3 rows. Gradients come back the same way.
    assert owner["all_to_all", "forward", "floats", "bytes"] == 3 * ROW
    assert other["all_to_all", "forward", "floats", "bytes"] == 0
    assert owner["all_to_all", "backward", "floats", "bytes"] == 0
    assert other["all_to_all", "backward", "floats", "bytes"] == 3 * ROW
    assert owner["ids", "", "", ""] == 10
    assert other["ids", "", "", ""] == 0


def test_row_wise_bytes() -> None:
    first, second = run_on_ranks(cases.table_wise_bags, 2, "row_wise")
    # Ids 0 to 2 live on rank 0. All 3 lengths go to both ranks, the second's 5 ids to rank 0.
    sizes = 3 * 8
    assert first["all_to_all", "forward", "integers", "bytes"] == sizes + 3 * 8
    assert second["all_to_all", "forward", "integers", "bytes"] == sizes + 3 * 8 + 5 * 8
    # Partial sums of the other rank's 3 rows; in the backward pass the gradients of one's own.
    for rank in (first, second):
        assert rank["reduce_scatter", "forward", "floats", "bytes"] == 3 * ROW
        assert rank["all_gather", "backward", "floats", "bytes"] == 3 * ROW
    assert [rank["ids", "", "", ""] for rank in (first, second)] == [10, 0]


def test_data_parallel_bytes() -> None:
    for rank in run_on_ranks(cases.table_wise_bags, 2, "data_parallel"):
        # The gradient of the whole table: 12 rows, once out and once back in halves.
        assert rank["all_reduce", "backward", "floats", "bytes"] == 12 * ROW
        assert rank["all_to_all", "forward", "integers", "bytes"] == 0
        assert rank["ids", "", "", ""] == 5


def test_synchronous_collectives_are_not_counted_twice() -> None:
    for sent in run_on_ranks(cases.sync_row_wise, 2):
        assert sent == {
            "reduce_scatter forward": 4 * ROW,
            "all_gather backward": 4 * ROW,
            "total": 8 * ROW,
        }


def test_ddp_all_reduces_in_the_backward_pass() -> None:
    for sent in run_on_ranks(cases.ddp, 4):
        num_bytes = 2 * 4 * (3 * 5 + 5) * 3 // 4
        assert sent == {"backward": num_bytes, "all_reduce": num_bytes}


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "mixed"])
def test_a_train_pipeline_sends_what_a_plain_loop_sends(sharding: str) -> None:
    for plain, piped, plain_ids, piped_ids in run_on_ranks(
        cases.plain_and_pipelined, 2, sharding, "unique"
    ):
        assert plain_ids == piped_ids > 0
        assert piped.keys() == plain.keys()
        # The pipeline joins the messages that announce sizes; nothing else differs.
        assert piped.pop("all_to_all") == pytest.approx(plain.pop("all_to_all"), rel=0.02)
        assert piped == plain
        assert plain["all_reduce"] > 0


def test_deduplication_sends_and_looks_up_less() -> None:
    few = run_on_ranks(cases.plain_and_pipelined, 2, "table_wise", "unique")
    all_rows = run_on_ranks(cases.plain_and_pipelined, 2, "table_wise", "plain")
    for deduplicated, plain in zip(few, all_rows, strict=True):
        assert deduplicated[0]["all_to_all"] < plain[0]["all_to_all"]
    assert sum(rank[2] for rank in few) < sum(rank[2] for rank in all_rows)


def test_an_id_that_rows_share_is_looked_up_once() -> None:
    looked_up: Counter[str] = sum(run_on_ranks(cases.ids_of_partial_batches, 2), Counter())
    stored: Counter[str] = Counter()
    for rank, step in product(range(2), range(NUM_STEPS)):
        batch = make_batch(rank, step, form="partial", moving=True)
        for partial in batch.partials:
            stored.update(dict(zip(partial.keys(), partial.length_per_key(), strict=True)))
        (exact,) = InverseKeyedJaggedTensor.from_kjt(
            make_batch(rank, step, form="plain", moving=True).kjt, [["s0"]]
        )
        stored["s0 of unique rows"] += exact.values().numel()
    for sequence in ("s0", "s1"):
        assert looked_up[sequence] == stored[sequence] > 0
    assert looked_up["s0"] < 0.8 * stored["s0 of unique rows"]
    # Modules that pool have no use for shared ids.
    assert looked_up["p0"] > stored["p0"]


def test_counters_add_up_and_reset() -> None:
    counter = CollectiveBytes()
    with counter:
        torch.ones(2).sum()
    assert counter.total == 0
    assert counter.by_kind() == {}
    counter.reset()
    with lookup_ids(nn.Linear(1, 1)) as ids:
        pass
    assert ids.total == 0
