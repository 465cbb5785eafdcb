"""A tiered collection does what one without tiers does, or says that it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from tests.sharded import plan_of
from torch import Tensor
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.sharding_plan import row_wise
from torchrec.distributed.types import CommOp, ShardingEnv
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_flexshard.runtime import (
    RowTiers,
    TieredEmbeddingCollection,
    TieredEmbeddingCollectionSharder,
    tier_groups,
)
from recd_plugin_flexshard.runtime.collection import CopyTier
from recd_plugin_flexshard.runtime.touched import Wire
from recd_plugin_flexshard.tests.runtime.model import COPIES, DIM, Job, Optimizer, TierModel
from recd_plugins.runtime.errors import ExactnessError, RecdError, SetupError
from recd_plugins.sharding.byte_counter import CollectiveBytes
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.rank_state import copy_weights

TIERS = {"a": RowTiers([3, 0], [7, 4, 6]), "b": RowTiers([], [1])}
# Hot, flex and cold rows of a, repeated ones too, and rows of the others.
IDS = {
    "f": [[3, 8], [7, 7, 4], []],
    "g": [[0], [3, 5], [6]],
    "h": [[1], [0, 1], [2]],
    "k": [[5], [], [5]],
    "m": [[], [4, 4], [0]],
}


def batch(rank: int = 0, **ids: list[list[int]]) -> KeyedJaggedTensor:
    lists = (IDS | ids).values()
    flat = [row[:: -1 if rank else 1] for rows in lists for row in rows]
    values, lengths = torch.tensor([id for row in flat for id in row]), [len(row) for row in flat]
    return KeyedJaggedTensor(list(IDS), values, lengths=torch.tensor(lengths))


def loss(job: Job, features: KeyedJaggedTensor, scale: float = 1.0) -> Tensor:
    total = torch.zeros(())
    for number, jagged in enumerate(job.collection(features).values()):
        values = jagged.values()
        factors = torch.arange(values.numel()).view_as(values).cos() + number
        total = total + (values.sin() * factors).sum()
    return scale * total


def a_step(job: Job, rank: int) -> None:
    loss(job, batch(rank)).backward()


def two_forward_passes(job: Job, rank: int) -> None:
    (loss(job, batch(rank)) + loss(job, batch(1 - rank), 0.5)).backward()
    first, second = loss(job, batch(rank)), loss(job, batch(1 - rank), 0.5)
    second.backward()
    first.backward()


def without_gradient(job: Job, rank: int) -> None:
    a_step(job, rank)
    job.dmp.eval()
    with torch.no_grad():
        loss(job, batch(rank))
    job.dmp.train()
    a_step(job, rank)


def backward_passes_elsewhere(job: Job, rank: int) -> None:
    unused = loss(job, batch(rank))
    other = torch.ones(2, requires_grad=True)
    (other * unused.detach()).sum().backward()
    del unused
    a_step(job, rank)


def twice_through_one_graph(job: Job, rank: int) -> None:
    total = loss(job, batch(rank))
    total.backward(retain_graph=True)
    total.backward()


def another_learning_rate(job: Job, rank: int) -> None:
    optimizer = job.dmp.fused_optimizer
    a_step(job, rank)
    for rate in (0.125, 0.25):
        for group in optimizer.param_groups:
            group["lr"] = rate
        if rate == 0.125:
            optimizer.zero_grad()  # which sets it
        a_step(job, rank)
    total = loss(job, batch(rank))
    optimizer.step()
    total.backward()  # by the rate of the forward pass
    a_step(job, rank)


def part_of_the_features(job: Job, rank: int) -> None:
    features = batch(rank, f=[[], [], []] if rank == 0 else IDS["f"])
    job.collection(features)["f"].values().sin().sum().backward()


def a_state_dict_in_between(job: Job, rank: int) -> None:
    total = loss(job, batch(rank))
    job.dmp.state_dict()
    total.backward()
    a_step(job, rank)
    twice = {name: 2 * tensor for name, tensor in job.weights().items()}
    copy_weights(job.dmp.state_dict(), twice)
    a_step(job, rank)


def ids_of_32_bits(job: Job, rank: int) -> None:
    all_64 = batch(rank)
    values, lengths = all_64.values().int(), all_64.lengths().int()
    loss(job, KeyedJaggedTensor(all_64.keys(), values, lengths=lengths)).backward()


def with_eps_0(job: Job, rank: int) -> None:
    job.dmp.fused_optimizer.update_hyper_parameters({"eps": 0.0})
    a_step(job, rank)


PROCEDURES: tuple[Callable[[Job, int], None], ...] = (
    *(a_step, two_forward_passes, without_gradient, backward_passes_elsewhere),
    *(twice_through_one_graph, another_learning_rate, part_of_the_features),
    *(a_state_dict_in_between, ids_of_32_bits, with_eps_0),
)


def weights_after(
    rank: int, world_size: int, optimizer: Optimizer
) -> dict[str, list[dict[str, Tensor]]]:
    found: dict[str, list[dict[str, Tensor]]] = {}
    for procedure in PROCEDURES:
        for tiers, sparse in ((None, ()), (TIERS, ()), (TIERS, COPIES)):
            job = Job(optimizer, tiers, sparse=sparse)
            procedure(job, rank)
            found.setdefault(procedure.__name__, []).append(job.weights())
    return found


@pytest.mark.parametrize(("optimizer", "ranks_per_node"), [("sgd", 1), ("rowwise_adagrad", 2)])
def test_it_trains_as_without_tiers(optimizer: Optimizer, ranks_per_node: int) -> None:
    initial = TierModel(None).state_dict()
    for ran in run_on_ranks(weights_after, 2, optimizer, local_world_size=ranks_per_node):
        for procedure, (without, *with_tiers) in ran.items():
            assert any(not torch.equal(each, initial[name]) for name, each in without.items())
            for weights in with_tiers:
                found, expected = {procedure: weights}, {procedure: without}
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def outputs(rank: int, world_size: int, need_indices: bool) -> None:
    without, with_tiers = (
        {
            name: (each.values().detach(), each.lengths(), each.weights_or_none())
            for name, each in job.collection(batch(rank)).items()
        }
        for job in (Job("sgd", tiers, need_indices=need_indices) for tiers in (None, TIERS))
    )
    assert list(with_tiers) == list(without)
    assert all((ids is not None) == need_indices for _, _, ids in without.values())
    torch.testing.assert_close(with_tiers, without, rtol=0, atol=0)


@pytest.mark.parametrize("need_indices", [False, True])
def test_outputs(need_indices: bool) -> None:
    run_on_ranks(outputs, 4, need_indices, local_world_size=2)


def test_it_is_the_collection_it_replaces() -> None:
    plain = TierModel(None, need_indices=True).sequences
    tiered = TieredEmbeddingCollection(plain, {"b": TIERS["b"], "a": TIERS["a"]})
    assert tiered.state_dict().keys() == plain.state_dict().keys()
    for name, parameter in tiered.named_parameters():
        assert parameter is plain.get_parameter(name)
    for name, expected in plain(batch()).items():
        output = tiered(batch())[name]
        assert torch.equal(output.values(), expected.values())
        assert torch.equal(output.weights(), expected.weights())
    assert list(tiered.tiers) == ["a", "b"]
    # Two hot rows, and two of four flex rows; all six are known, and found by a key and a place.
    assert tiered.overlay_bytes(2, "sgd") == 4 * (4 * DIM + 8) + 6 * 24
    assert tiered.overlay_bytes(1, "rowwise_adagrad") == 6 * (4 * (DIM + 1) + 8) + 6 * 24


def bytes_sent(rank: int, world_size: int, sparse: Collection[CopyTier]) -> Counter[str]:
    job = Job("sgd", TIERS, sparse=sparse, sends_all=True)
    a_step(job, rank)
    job.collection.state_dict()
    with torch.no_grad():
        job.collection(batch(rank))  # the copies follow the state dict
    with CollectiveBytes() as counter:
        a_step(job, rank)
    groups, sent = tier_groups().names, Counter[str]()
    for traffic, num_bytes in counter.sent.items():
        sent[groups.get(traffic.group, "other")] += num_bytes
    return sent


def test_traffic_by_tier() -> None:
    row = 4 * DIM
    for sent in run_on_ranks(bytes_sent, 4, (), local_world_size=2):
        assert sent["hot"] == 2 * (2 * row) * 3 // 4
        # Two of four flex rows are on either rank of a node.
        assert sent["flex_gradients"] == 2 * (2 * row) * 1 // 2
        assert min(sent["flex"], sent["cold"]) > 0
        # Nothing else is sent than whether somebody may have written into the state dict.
        assert sent["other"] == 2 * 4 * 3 // 4
    # All ranks look up all rows that have copies, of which each tier has two on a rank.
    ranks, bits = run_on_ranks(bytes_sent, 4, COPIES, local_world_size=2), 1
    # A rank sends its gradients, but those that it sums, and what it sums to all others.
    assert sum(each["hot"] for each in ranks) == 4 * 3 * bits + (3 + 3) * 2 * row
    assert all(each["flex_gradients"] == bits + 2 * row for each in ranks)


def of_a_deduplicated_batch(rank: int, world_size: int) -> None:
    module = Job("sgd", TIERS).collection
    names = list(IDS)
    deduplicated = KeyedJaggedTensor(
        keys=names,
        values=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1, 0, 0, 0]),
        stride_per_key_per_rank=[[1], [1], [2], [1], [1]],
        inverse_indices=(names, torch.tensor([[0, 0], [0, 0], [0, 1], [0, 0], [0, 0]])),
    )
    lengths = torch.tensor([1, 1, 1, 1, 1, 0, 0, 0, 0, 0])
    plain = KeyedJaggedTensor(names, torch.tensor([1, 1, 2, 2, 3]), lengths=lengths)
    found, expected = (
        {name: rows.values().detach() for name, rows in module(each).items()}
        for each in (deduplicated, plain)
    )
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


def test_rows_of_a_deduplicated_batch_are_all_there() -> None:
    run_on_ranks(of_a_deduplicated_batch, 1)


def table(name: str = "t", **more: Any) -> EmbeddingConfig:
    sizes = {"embedding_dim": DIM, "num_embeddings": 9}
    return EmbeddingConfig(name=name, feature_names=["f"], **sizes, **more)


SGD: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
EXACT_ADAGRAD = {"optimizer": EmbOptimType.EXACT_ADAGRAD}
ADAGRAD = SGD | {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "eps": 1e-2}


class Attempt(NamedTuple):
    message: str
    error: type[RecdError] = SetupError
    sharding: Any = "row_wise"
    tables: Collection[EmbeddingConfig] = (table(),)
    fused: dict[str, Any] = SGD
    tiers: dict[str, RowTiers] = {"t": RowTiers([1])}  # noqa: RUF012 - of a tuple


REFUSED = [
    Attempt("plan uses 'table_wise'", sharding="table_wise"),
    Attempt("plan uses 'data_parallel'", sharding="data_parallel"),
    Attempt("kernel 'dense'", sharding=row_wise(compute_kernel="dense")),
    Attempt("feature 'f': tables 't' and 'u' of one", tables=(table(), table("u"))),
    Attempt("only FP32", tables=(table(data_type=DataType.FP16),)),
    Attempt("row 9 has to be copied", tiers={"t": RowTiers([], [9])}),
    Attempt("optimizer exact_adagrad", ExactnessError, fused=SGD | EXACT_ADAGRAD),
    Attempt("weight_decay", fused=ADAGRAD | {"weight_decay": 0.1}),
    Attempt("gradient_clipping=True", ExactnessError, fused=SGD | {"gradient_clipping": True}),
    Attempt("output_dtype fp16", ExactnessError, fused=SGD | {"output_dtype": SparseType.FP16}),
]


def refusals(rank: int, world_size: int) -> None:
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    dtensors = ShardingEnv(world_size, rank, dist.group.WORLD, output_dtensor=True)

    def shard(attempt: Attempt, env: ShardingEnv) -> None:
        plain = EmbeddingCollection(tables=list(attempt.tables))
        module = TieredEmbeddingCollection(plain, attempt.tiers)
        sharder = TieredEmbeddingCollectionSharder(dict(attempt.fused))
        plan = plan_of(module, attempt.sharding, sharder, 1, 1, "cpu")
        sharder.shard(module, plan, env, torch.device("cpu"))

    for attempt in REFUSED:
        with pytest.raises(attempt.error, match=attempt.message):
            shard(attempt, env)
    with pytest.raises(SetupError, match="does not support DTensors"):
        shard(Attempt(""), dtensors)
    tiered = Job("sgd", TIERS).collection
    with pytest.raises(ExactnessError, match="Call compute_and_output_dist"):
        tiered.output_dist(tiered.create_context(), [])
    with pytest.raises(SetupError, match="ModelDeltaTracker cannot track changes of flexshard"):
        tiered.register_post_lookup_tracker_fn(print)
    Job("sgd", None).collection.register_post_lookup_tracker_fn(print)
    job = Job("rowwise_adagrad", TIERS)
    a_step(job, rank)
    job.dmp.fused_optimizer.update_hyper_parameters({"weight_decay": 0.1})
    with pytest.raises(ExactnessError, match=r"weight_decay=0\.1"):
        a_step(job, rank)


def test_what_is_refused() -> None:
    run_on_ranks(refusals, 1)


@pytest.mark.parametrize(("hot", "flex"), [([3, 1, 3], []), ([3], [1, 3]), ([], [2, -1])])
def test_rows_that_are_no_tiers(hot: list[int], flex: list[int]) -> None:
    with pytest.raises(SetupError, match="is negative or appears twice"):
        RowTiers(hot, flex)


def codecs(kind: CommType) -> dict[str, Any]:
    both = get_qcomm_codecs(QCommsConfig(forward_precision=kind, backward_precision=kind))
    return {CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name: both}


@pytest.mark.parametrize(("kind", "width"), [(CommType.BF16, 32), (CommType.INT8, 40)])
@pytest.mark.parametrize("num_rows", [0, 5])
def test_rows_travel_one_by_one(kind: CommType, width: int, num_rows: int) -> None:
    wire, rows = Wire(codecs(kind), 32), torch.rand(num_rows, 32)
    encoded = wire.gradients.encode(rows)
    assert encoded.shape == (num_rows, width)
    # In another order, as ranks choose among them.
    decoded = wire.gradients.decode(encoded.flip(0))
    assert torch.allclose(decoded, rows.flip(0), atol=4e-3)


def test_a_block_of_several_rows_is_refused() -> None:
    """TorchRec's int8 has one scale for 32 scalars, which may be those of two rows."""
    with pytest.raises(SetupError, match=r"embedding_dim is 16, but .* blocks of 32"):
        Wire(codecs(CommType.INT8), 16)
