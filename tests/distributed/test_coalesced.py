"""Modules with coalesced tables do what they do without, and send what is distinct."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from tests.covering import by_night, covering
from tests.sharded import CPU, bags, sequences, shard
from torch import Tensor, nn
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim import SGD
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recd_plugins.config.schema import TrainingSpec
from recd_plugins.runtime.errors import RecdError, SetupError
from recd_plugins.sharding.byte_counter import CollectiveBytes, lookup_ids
from recd_plugins.sharding.coalesced import input_dist
from recd_plugins.sharding.coalesced import outputs as coalesced_outputs
from recd_plugins.sharding.coalesced.input_dist import feature_groups
from recd_plugins.sharding.sharders import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
    fused_params,
)
from recd_plugins.testing.device import DEVICE
from recd_plugins.testing.gloo import run_on_ranks

DIM, ROWS = 8, 40
# t0 has two features, and s is of two tables.
FEATURES = {"t0": ["a", "b"], "t1": ["s"], "t2": ["s", "c"], "t3": ["d"]}
KEYS = ["d", "s", "b", "c", "a"]
MIXED = dict(zip(FEATURES, ("table_wise", "row_wise", "row_wise", "column_wise"), strict=True))
ALL, SOME, OTHERS = tuple(FEATURES), ("t0", "t3"), ("t0", "t1", "t2")
TRAINING = TrainingSpec(optimizer="rowwise_adagrad", learning_rate=0.3, eps=1e-3)


def make(kind: str) -> Any:
    torch.manual_seed(0)
    sizes: Any = {"embedding_dim": DIM, "num_embeddings": ROWS}
    if kind.startswith("sequences"):
        tables = [EmbeddingConfig(name=n, feature_names=f, **sizes) for n, f in FEATURES.items()]
        return EmbeddingCollection(tables=tables, need_indices=kind == "sequences")
    sizes["pooling"] = PoolingType.MEAN if kind == "means" else PoolingType.SUM
    bags = [EmbeddingBagConfig(name=n, feature_names=f, **sizes) for n, f in FEATURES.items()]
    return EmbeddingBagCollection(tables=bags, is_weighted=kind == "weighted")


def sharder_of(module: nn.Module) -> Any:
    if isinstance(module, EmbeddingCollection):
        return ExactEmbeddingCollectionSharder
    return ExactEmbeddingBagCollectionSharder


def coalesced_module(
    module: nn.Module, sharding: str, coalesced: Collection[str], **options: Any
) -> nn.Module:
    sharder = sharder_of(module)(fused_params(TRAINING), coalesced=coalesced, **options)
    return shard(module, [sharder], MIXED if sharding == "mixed" else sharding)


def batch(rank: int, step: int, kind: str = "", dtype: torch.dtype = torch.int64) -> Any:
    """Few rows are read often; the second batch of rank 0 has one row, the third no ids."""
    random = torch.Generator().manual_seed(10 * step + rank)
    size = 1 if (step, rank) == (1, 0) else 5 + rank
    lengths = torch.randint(0, 4, (len(KEYS) * size,), generator=random)
    if (step, rank) == (2, 0):
        lengths.zero_()
    ids = (torch.rand(int(lengths.sum()), generator=random) ** 3 * ROWS).to(dtype)
    weights = torch.rand(len(ids), generator=random) if kind == "weighted" else None
    return KeyedJaggedTensor(keys=KEYS, values=ids, lengths=lengths, weights=weights)


@dataclass(frozen=True)
class Case:
    kind: str
    sharding: str
    coalesced: tuple[str, ...]
    dtype: torch.dtype = torch.int64
    as_on_cuda: bool = False  # without numba kernels, and with empty rows of groups with few ids


@contextmanager
def _as_on(device: str) -> Iterator[None]:
    """Take the code of CUDA devices, on CPU tensors."""
    on_cpu = device == "cpu"
    with (
        patch.object(input_dist, "_takes_no_rows", return_value=on_cpu),
        patch.object(coalesced_outputs, "_is_on_cpu", return_value=on_cpu),
        nullcontext() if on_cpu else patch.object(input_dist, "_by_hash", input_dist.by_sorting),
    ):
        yield


def differences(rank: int, world_size: int, cases: list[Case]) -> list[float]:
    return [_difference(rank, case) for case in cases]


def _difference(rank: int, case: Case) -> float:
    found: list[list[Tensor]] = []
    for coalesced in (case.coalesced, ()):
        dmp: Any = coalesced_module(make(case.kind), case.sharding, coalesced)
        found.append([])
        with _as_on("cuda" if case.as_on_cuda else DEVICE.type):
            for step in range(4):
                found[-1] += outputs(dmp, batch(rank, step, case.kind, case.dtype))
        state = dmp.fused_optimizer.state_dict()["state"]
        of_tables = [*dmp.state_dict().values(), *(t for v in state.values() for t in v.values())]
        found[-1] += [local.tensor.clone() for t in of_tables for local in t.local_shards()]
    mine, other = found
    assert [each.shape for each in mine] == [each.shape for each in other]
    return max(float((a - b).abs().max()) for a, b in zip(mine, other, strict=True) if a.numel())


def outputs(dmp: nn.Module, features: KeyedJaggedTensor) -> list[Tensor]:
    output = dmp(features.to(DEVICE)).wait()
    if isinstance(output, dict):
        values = {name: jagged.values() for name, jagged in output.items()}
        extra = [t for j in output.values() for t in (j.lengths(), j.offsets())]
        extra += [w for j in output.values() if (w := j.weights_or_none()) is not None]
    else:
        values, extra = {name: output[name] for name in output.keys()}, []  # noqa: SIM118
    found = [values[name] for name in sorted(values)]
    losses = [
        (v.sin() * torch.arange(v.numel(), device=v.device).view_as(v).cos()).sum() for v in found
    ]
    torch.stack(losses).sum().backward()
    return [*(v.detach() for v in found), *(each.float() for each in extra)]


def test_outputs_weights_and_optimizer_state_are_those_without() -> None:
    axes: list[tuple[Any, ...]] = [
        (1, 2),
        ("bags", "means", "weighted", "sequences"),
        ("table_wise", "row_wise", "column_wise", "mixed"),
        (ALL, SOME, OTHERS),
        (torch.int64, torch.int32),
        (False, True),
    ]
    every = list(product(*axes))
    chosen = every if by_night() else covering(every, 2)
    for world_size in (1, 2):
        cases = [Case(*cell) for size, *cell in chosen if size == world_size]
        for found in run_on_ranks(differences, world_size, cases):
            for case, difference in zip(cases, found, strict=True):
                assert difference <= 2e-6, case


def test_on_cuda_bags_have_as_many_rows_as_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM's kernels there divide by their ratio, as a whole number."""
    monkeypatch.setattr(input_dist, "_takes_no_rows", lambda _: False)
    groups: Any = feature_groups(make("bags").embedding_bag_configs(), ALL)
    for step in range(3):
        unique, _ = input_dist.coalesce_bags(batch(0, step), groups)
        rows = dict(zip(unique.keys(), unique.stride_per_key(), strict=True))
        for group in groups.groups:
            assert sum(rows[name] for name in group) >= len(group), step


def sent(rank: int, world_size: int, kind: str) -> tuple[Counter[str], int, dict[str, int]]:
    dmp, features = coalesced_module(make(kind), "table_wise", ALL), batch(rank, 0)
    with CollectiveBytes() as counter, lookup_ids(dmp) as ids:
        outputs(dmp, features)
    by_key = {name: jagged.values() for name, jagged in features.to_dict().items()}
    # Ids of s are unique with none of t2's other feature: s is of t1, too.
    groups = {"ab": ["a", "b"], "s": ["s"], "c": ["c"], "d": ["d"]}
    distinct = {
        name: len(torch.unique(torch.cat([by_key[each] for each in names])))
        for name, names in groups.items()
    }
    total: Counter[str] = Counter()
    for traffic, num_bytes in counter.sent.items():
        total[f"{traffic.phase} {traffic.payload}"] += num_bytes
    return total, ids.total, distinct


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_embeddings_come_once_for_each_distinct_id(kind: str) -> None:
    """Tables 0 and 2 are rank 0's, tables 1 and 3 rank 1's."""
    (zero, ids_of_zero, of_zero), (one, ids_of_one, of_one) = run_on_ranks(sent, 2, kind)
    # Two tables look s up.
    distinct = sum(found.total() + found["s"] for found in map(Counter, (of_zero, of_one)))
    assert ids_of_zero + ids_of_one == distinct
    from_zero = 4 * DIM * (of_one["ab"] + of_one["s"] + of_one["c"])
    from_one = 4 * DIM * (of_zero["s"] + of_zero["d"])
    assert zero["forward floats"] == one["backward floats"] == from_zero
    assert one["forward floats"] == zero["backward floats"] == from_one


def test_names_that_are_taken_for_others() -> None:
    tables = sequences("clicks@7d", "other").embedding_configs()
    assert feature_groups(tables, []) is None
    with pytest.raises(SetupError, match=r"names 'clicks@7d' contain '@', .* is coalesced"):
        feature_groups(tables, ["t_clicks@7d"])


AB = ["a", "b"]
IDS = torch.tensor([3, 1, 3, 3, 0, 1, 1])
LENGTHS = torch.tensor([2, 0, 2, 1, 2, 0])
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, -1.0, 3.0, 0.25, 1.5])


def ab(module: nn.Module, coalesced: bool, **params: Any) -> nn.Module:
    tables = ["t_a", "t_b"] if coalesced else []
    sharder = sharder_of(module)({"learning_rate": 0.1, **params}, coalesced=tables)
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        sharder = FeatureProcessedEmbeddingBagCollectionSharder(sharder)
    return shard(module, [sharder], "table_wise", CPU)


def ab_bags(kind: Any = bags, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind("a", "b", rows=5, **options)


def ab_batch(
    weights: Tensor | None = None, inverse: list[list[int]] | None = None, stored: bool = False
) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=AB,
        values=IDS,
        lengths=LENGTHS,
        weights=weights,
        stride_per_key_per_rank=[[3], [3]] if stored or inverse else None,
        inverse_indices=(AB, torch.tensor(inverse)) if inverse else None,
    )


def values(output: Any, keys: list[str] = AB) -> Tensor:
    output = output.wait()
    if isinstance(output, KeyedTensor):
        return output.values().detach()
    return torch.cat([output[key].values().detach() for key in keys])


def in_halves(dmp: Any) -> Tensor:
    module = dmp.module
    context = module.create_context()
    features = module.input_dist(context, ab_batch()).wait().wait()
    return values(module.output_dist(context, module.compute(context, features)))


def out_of_range(kind: str, coalesced: bool) -> Tensor:
    dmp = coalesced_module(make(kind), "table_wise", ALL if coalesced else ())
    ids = torch.tensor([ROWS, 3, ROWS, -5, 2**40, 3] * len(KEYS))
    lengths = torch.tensor([4, 2] * len(KEYS))
    found = outputs(dmp, KeyedJaggedTensor(keys=KEYS, values=ids, lengths=lengths))
    return torch.cat([each.flatten() for each in found])


def odd_outputs(rank: int, world_size: int) -> list[tuple[str, Tensor, Tensor]]:
    half = {"output_dtype": SparseType.FP16}

    def weighted(dtype: torch.dtype, on: bool) -> Tensor:
        return values(ab(ab_bags(weighted=True), on)(ab_batch(WEIGHTS.to(dtype))))

    cases: dict[str, Callable[[bool], Tensor]] = {
        f"weights {dtype}": partial(weighted, dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float64)
    }
    cases |= {
        "ids as weights": lambda on: values(ab(ab_bags(), on)(ab_batch(IDS))),
        "half bags": lambda on: values(ab(ab_bags(), on, **half)(ab_batch())),
        "half sequences": lambda on: values(ab(ab_bags(sequences), on, **half)(ab_batch())),
        "bags in halves": lambda on: in_halves(ab(ab_bags(), on)),
        "sequences in halves": lambda on: in_halves(ab(ab_bags(sequences), on)),
        "bags out of range": partial(out_of_range, "bags"),
        "sequences out of range": partial(out_of_range, "sequences without ids"),
    }
    return [(name, output(True), output(False)) for name, output in cases.items()]


def test_outputs_of_odd_input_are_those_without() -> None:
    (found,) = run_on_ranks(odd_outputs, 1)
    for name, coalesced, plain in found:
        assert coalesced.dtype == plain.dtype, name
        tolerance = 2e-6 if plain.dtype == torch.float32 else 2e-3
        torch.testing.assert_close(coalesced, plain, rtol=tolerance, atol=tolerance, msg=name)


def clipping(kind: str) -> nn.Module:
    module, arguments = make(kind), {"lr": 1.0, "gradient_clipping": True}
    apply_optimizer_in_backward(SGD, module.parameters(), arguments)
    return coalesced_module(module, "table_wise", ["t3"])


def processed() -> nn.Module:
    processors = {key: PositionWeightedModule(3) for key in AB}
    return FeatureProcessedEmbeddingBagCollection(ab_bags(weighted=True), processors)


def sharded(kind: str, sharding: str, *coalesced: str, **options: Any) -> nn.Module:
    return coalesced_module(make(kind), sharding, coalesced, **options)


def look_up(module: nn.Module, **batch: Any) -> Any:
    return ab(module, True)(ab_batch(**batch)).wait()


REFUSED: dict[str, Callable[[], object]] = {
    "table 't0' is data-parallel or": lambda: sharded("bags", "data_parallel", "t0"),
    "table 't3' is data-par": lambda: sharded("sequences", "data_parallel", "t3"),
    "feature 's' looks up the tables": lambda: sharded("bags", "table_wise", "t1"),
    "Remove use_index_dedup": lambda: sharded(
        "sequences", "table_wise", "t1", "t2", use_index_dedup=True
    ),
    "table 't3' is coalesced and has gradient_clipping": lambda: clipping("bags"),
    "'t3' is coalesced and has gradient_clipping, which": lambda: clipping("sequences"),
    "feature 'a': inverse_indices range from 0 to 3, but the batch has 3 rows": lambda: look_up(
        ab_bags(), inverse=[[0, 1, 3], [0, 1, 2]]
    ),
    "feature 'b': inverse_indices range from -1 to 2": lambda: look_up(
        ab_bags(), inverse=[[0, 1, 2], [0, -1, 2]]
    ),
    "no inverse_indices for the features 'a', 'b'": lambda: look_up(ab_bags(), stored=True),
    "got a batch without weights": lambda: look_up(processed()),
    "table 't_a' lists feature 'a' twice": lambda: ab(ab_bags(feature_names=["a", "a"]), True),
}


def refusals(rank: int, world_size: int) -> None:
    for words, attempt in REFUSED.items():
        with pytest.raises(RecdError, match=re.escape(words)):
            attempt()


def test_refusals() -> None:
    run_on_ranks(refusals, 1)
