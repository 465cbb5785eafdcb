from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.distributed.parity_cases import Case, sharded_model, train
from tests.sharded import CPU, SGD, bags, exact_sharders, shard
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.sharding.byte_counter import CollectiveBytes, lookup_ids
from recd_plugins.testing.gloo import run_on_ranks


def check_collectives(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    ten, eight, rows = torch.zeros(10), torch.zeros(8), torch.zeros(4, 3, dtype=torch.int64)
    splits = [1, 2, 3, 4]
    receive = [splits[rank]] * world_size
    to_others, reduced = 4 * (10 - splits[rank]), 2 * 4 * 8 * 3 // 4
    all_to_all, one = dist.all_to_all_single, [1] * 4
    summed = torch.ops.torchrec.reduce_scatter_tensor

    def send() -> None:
        dist.send(ten, (rank + 1) % 4) if rank % 2 else dist.recv(ten, (rank - 1) % 4)

    cases: list[tuple[Callable[[], object], int]] = [
        (lambda: all_to_all(torch.empty(sum(receive)), ten, receive, splits), to_others),
        (lambda: all_to_all(torch.empty(8), eight), 4 * 6),
        (lambda: all_to_all(torch.empty_like(rows), rows, one, one), 8 * 3 * 3),
        (lambda: functional.all_to_all_single(ten, receive, splits, group).sum(), to_others),
        (lambda: dist.reduce_scatter_tensor(torch.empty(2), eight), 4 * 6),
        (lambda: dist.reduce_scatter(torch.empty(2), [*eight.view(4, 2)]), 4 * 6),
        (lambda: summed(eight, "sum", world_size, group.group_name, True), 4 * 6),
        (lambda: dist.all_gather_into_tensor(torch.empty(40), ten), 4 * 10 * 3),
        (lambda: dist.all_gather([torch.empty(10) for _ in range(4)], ten), 4 * 10 * 3),
        (lambda: dist.all_reduce(eight), reduced),
        (lambda: functional.all_reduce(eight, "sum", group).sum(), reduced),
        (lambda: dist.broadcast(ten, src=1), 4 * 10 * 3 if rank == 1 else 0),
        (lambda: dist.reduce(ten, dst=1), 0 if rank == 1 else 4 * 10),
        (send, 4 * 10 if rank % 2 else 0),
        (dist.barrier, 0),
    ]
    for number, (collective, expected) in enumerate(cases):
        with CollectiveBytes() as counter:
            collective()
        calls = 0 if collective is dist.barrier or (collective is send and not rank % 2) else 1
        assert (counter.total, sum(counter.calls.values())) == (expected, calls), number


def bytes_of_a_table(rank: int, world_size: int, place: str) -> Counter[tuple[str, ...]]:
    """One step of one table of 12 rows of 4 scalars; a feature of [0, 1], [2], [0, 1]."""
    dmp = shard(bags("a"), exact_sharders(SGD), place, CPU)
    ids, lengths = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([2, 1, 2])
    features = KeyedJaggedTensor(["a"], ids, lengths=lengths)
    for _ in range(2):
        dmp(features).values().sum().backward()  # DDP sets itself up in it
    with CollectiveBytes() as counter, lookup_ids(dmp) as looked_up:
        dmp(features).values().sum().backward()
    sent: Counter[tuple[str, ...]] = Counter()
    for traffic, num_bytes in counter.sent.items():
        sent[traffic.kind, traffic.phase, traffic.payload] += num_bytes
    sent["ids",] = looked_up.per_feature["a"]
    return sent


def plain_and_pipelined(rank: int, world_size: int) -> list[tuple[dict[str, int], int]]:
    results = []
    for pipelined in (False, True):
        case = Case("mixed", "both", "sgd", pipelined)
        dmp, optimizer = sharded_model(case)
        with CollectiveBytes() as counter, lookup_ids(dmp) as ids:
            train(dmp, optimizer, case, rank)
        results.append((counter.by_kind(), ids.total))
    return results


def test_every_collective_against_hand_computed_bytes() -> None:
    run_on_ranks(check_collectives, 4)


# Each of two ranks has 3 rows with 5 ids of one feature; embeddings are 4 floats of 4 bytes.
ROW = 4 * 4
IDS, VECTORS = ("all_to_all", "forward", "integers"), ("all_to_all", "forward", "floats")
# Each tells the other how many lengths and ids and which batch size come.
SIZES = 3 * 8


def test_table_wise_bytes() -> None:
    owner, other = run_on_ranks(bytes_of_a_table, 2, "table_wise")
    # Rank 1 sends rank 0 its 3 lengths and 5 values, of 8 bytes, and gets its 3 rows.
    assert (owner[IDS], other[IDS]) == (SIZES, SIZES + (3 + 5) * 8)
    assert (owner[VECTORS], other[VECTORS]) == (3 * ROW, 0)
    gradients = ("all_to_all", "backward", "floats")
    assert (owner[gradients], other[gradients]) == (0, 3 * ROW)
    assert (owner["ids",], other["ids",]) == (10, 0)


def test_row_wise_bytes() -> None:
    first, second = run_on_ranks(bytes_of_a_table, 2, "row_wise")
    # Ids 0 to 2 live on rank 0. All 3 lengths go to both ranks, the second's 5 ids to rank 0.
    assert (first[IDS], second[IDS]) == (SIZES + 3 * 8, SIZES + 3 * 8 + 5 * 8)
    # Partial sums of the other rank's 3 rows; in the backward pass the gradients of one's own.
    for rank in (first, second):
        assert rank["reduce_scatter", "forward", "floats"] == 3 * ROW
        assert rank["all_gather", "backward", "floats"] == 3 * ROW
    assert (first["ids",], second["ids",]) == (10, 0)


def test_data_parallel_bytes() -> None:
    for rank in run_on_ranks(bytes_of_a_table, 2, "data_parallel"):
        # The gradient of the whole table: 12 rows, once out and once back in halves.
        assert rank["all_reduce", "backward", "floats"] == 12 * ROW
        assert (rank[IDS], rank["ids",]) == (0, 5)


def test_a_train_pipeline_sends_what_a_plain_loop_sends() -> None:
    for (plain, plain_ids), (piped, piped_ids) in run_on_ranks(plain_and_pipelined, 2):
        assert plain_ids == piped_ids > 0
        assert piped.keys() == plain.keys()
        # The pipeline joins the messages that announce sizes; nothing else differs.
        assert piped.pop("all_to_all") == pytest.approx(plain.pop("all_to_all"), rel=0.02)
        assert piped == plain
        assert plain["all_reduce"] > 0
