"""What the ranks of test_byte_counter.py do: known collectives and known lookups, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.distributed import guard_cases
from tests.distributed.parity_cases import Case, _input, _shard
from tests.distributed.parity_model import NUM_STEPS, Form, ParityModel
from torch import nn
from torchrec.distributed import comm_ops
from torchrec.distributed.sharding_plan import data_parallel, row_wise, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import PoolingType

from recd_plugins.sharding.byte_counter import CollectiveBytes, lookup_ids


def collectives(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """Bytes and calls of one collective after the other, on 4 ranks."""
    group = dist.group.WORLD
    assert group is not None
    ten = torch.zeros(10)
    eight = torch.zeros(8)
    splits = [1, 2, 3, 4]
    receive = [splits[rank]] * world_size
    actions = {
        "all_to_all_single": lambda: dist.all_to_all_single(
            torch.empty(sum(receive)), ten, receive, splits
        ),
        "all_to_all_single even": lambda: dist.all_to_all_single(torch.empty(8), eight),
        "all_to_all_single int64 rows": lambda: dist.all_to_all_single(
            torch.empty(4, 3, dtype=torch.int64),
            torch.zeros(4, 3, dtype=torch.int64),
            [1] * 4,
            [1] * 4,
        ),
        "functional all_to_all": lambda: functional.all_to_all_single(
            ten, receive, splits, group
        ).sum(),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(2), eight),
        "reduce_scatter": lambda: dist.reduce_scatter(
            torch.empty(2), [torch.zeros(2) for _ in range(4)]
        ),
        "torchrec reduce_scatter": lambda: torch.ops.torchrec.reduce_scatter_tensor(
            eight, "sum", world_size, group.group_name, True
        ),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(40), ten),
        "all_gather": lambda: dist.all_gather([torch.empty(10) for _ in range(4)], ten),
        "all_reduce": lambda: dist.all_reduce(eight),
        "functional all_reduce": lambda: functional.all_reduce(eight, "sum", group).sum(),
        "broadcast": lambda: dist.broadcast(ten, src=1),
        "reduce": lambda: dist.reduce(ten, dst=1),
        "scatter": lambda: dist.scatter(
            torch.empty(10), [ten] * world_size if rank == 1 else None, src=1
        ),
        "send": lambda: (
            dist.send(ten, (rank + 1) % 4) if rank % 2 else dist.recv(ten, (rank - 1) % 4)
        ),
        "barrier": lambda: dist.barrier(),
    }
    counted = {}
    for name, action in actions.items():
        with CollectiveBytes() as counter:
            action()
        counted[name] = (counter.total, sum(counter.calls.values()))
        assert sum(counter.to_ranks.values()) in (0, counter.total)
        if name == "all_to_all_single":
            of_places = [0 if place == rank else 4 * n for place, n in enumerate(splits)]
            assert [counter.to_ranks[group.group_name, place] for place in range(4)] == of_places
    return counted


def table_wise_bags(rank: int, world_size: int, kind: str) -> Counter[tuple[str, str, str, str]]:
    """One step of one table of 12 rows of 4 scalars; a feature of [0, 1], [2], [0, 1]."""
    generator = {
        "table_wise": lambda: table_wise(rank=0, compute_kernel="fused"),
        "row_wise": lambda: row_wise(compute_kernel="fused"),
        "data_parallel": data_parallel,
    }[kind]()
    bags = guard_cases.bags(a=PoolingType.SUM)
    dmp = guard_cases.shard(bags, {"a": generator}, stock=False)
    features = guard_cases.plain("a")
    for _ in range(2):
        dmp(features).values().sum().backward()  # DDP sets itself up in it
    with CollectiveBytes() as counter, lookup_ids(dmp) as ids:
        dmp(features).values().sum().backward()
    sent: Counter[tuple[str, str, str, str]] = Counter()
    for traffic, num_bytes in counter.sent.items():
        kind_, _, phase, payload = astuple(traffic)
        sent[kind_, phase, payload, "bytes"] += num_bytes
    sent["ids", "", "", ""] = ids.per_feature["a"]
    return sent


def sync_row_wise(rank: int, world_size: int) -> dict[str, int]:
    """Row-wise reduce-scatter by TorchRec's synchronous collectives, forward and backward."""
    value = torch.zeros(8, 4, requires_grad=True)
    comm_ops.set_use_sync_collectives(True)
    try:
        with CollectiveBytes() as counter:
            output = comm_ops.reduce_scatter_base_pooled(value).wait()
            output.sum().backward()
    finally:
        comm_ops.set_use_sync_collectives(False)
    return {
        f"{kind} {phase}": sum(
            n for t, n in counter.sent.items() if (t.kind, t.phase) == (kind, phase)
        )
        for kind, phase in (("reduce_scatter", "forward"), ("all_gather", "backward"))
    } | {"total": counter.total}


def plain_and_pipelined(
    rank: int, world_size: int, sharding: str, form: Form
) -> tuple[dict[str, int], dict[str, int], int, int]:
    """Bytes by kind and ids of the same four steps, in a plain loop and in a train pipeline."""
    results = []
    for pipelined in (False, True):
        case = Case(sharding, "both", "sgd", pipelined)
        weights = {k: v.clone() for k, v in ParityModel(case.parts).state_dict().items()}
        dmp, optimizer = _shard(case, world_size, weights)
        batches = [_input(case, rank, step, form) for step in range(NUM_STEPS)]
        with CollectiveBytes() as counter, lookup_ids(dmp) as ids:
            if pipelined:
                pipeline = TrainPipelineSparseDist(
                    dmp, optimizer, torch.device("cpu"), execute_all_batches=True
                )
                iterator = iter(batches)
                for _ in batches:
                    pipeline.progress(iterator)
            else:
                for batch in batches:
                    optimizer.zero_grad()
                    dmp(batch)[0].backward()
                    optimizer.step()
        results.append((counter.by_kind(), ids.total))
    (plain, plain_ids), (piped, piped_ids) = results
    return plain, piped, plain_ids, piped_ids


def ids_of_partial_batches(rank: int, world_size: int) -> Counter[str]:
    """Ids that the lookups of this rank take in four steps, by feature."""
    case = Case("table_wise", "both", "sgd", False, form="partial")
    weights = {k: v.clone() for k, v in ParityModel(case.parts).state_dict().items()}
    dmp, _ = _shard(case, world_size, weights)
    with lookup_ids(dmp) as ids:
        for step in range(NUM_STEPS):
            dmp(_input(case, rank, step, "partial"))
    return ids.per_feature


def ddp(rank: int, world_size: int) -> dict[str, int]:
    """All-reduce of a Linear(3, 5)'s gradients by DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 5))
    for _ in range(2):  # sets itself up
        model(torch.zeros(2, 3)).sum().backward()
    with CollectiveBytes() as counter:
        model(torch.zeros(2, 3)).sum().backward()
    return counter.by("phase") | counter.by_kind()
