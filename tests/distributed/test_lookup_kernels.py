"""FBGEMM's kernels in TorchRec's lookups: rows fetched ahead, and batch forms by optimizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.sharded import configs, sequences
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec import optim
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import CacheParams, ParameterSharding
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.compat import lookup_kernels
from recd_plugins.compat.row_updates import check_updates, clipped_tables, why_plain_kernels
from recd_plugins.runtime.errors import SetupError
from recd_plugins.sharding.exact_modules import ExactShardedEmbeddingCollection
from recd_plugins.sharding.overlap import LookupAhead


class Kernel:
    def __init__(
        self, compute_kernel: EmbeddingComputeKernel, num_features: int, pipelined: bool = True
    ) -> None:
        self.prefetch_pipeline = pipelined
        self.fetched: list[list[int]] = []
        self.emb_module = self
        tables = [SimpleNamespace(compute_kernel=compute_kernel)]
        # As TorchRec groups tables.
        self.config = SimpleNamespace(
            compute_kernel=EmbeddingComputeKernel.FUSED,
            embedding_tables=tables,
            num_features=lambda: num_features,
        )

    def prefetch(self, indices: torch.Tensor, offsets: torch.Tensor, *_: Any) -> None:
        assert int(offsets[-1]) == len(indices)
        self.fetched.append(indices.tolist())


def test_only_kernels_with_a_cache_fetch_ahead() -> None:
    plain = Kernel(EmbeddingComputeKernel.FUSED, 1)
    cached = Kernel(EmbeddingComputeKernel.FUSED_UVM_CACHING, 2)
    unlocked = Kernel(EmbeddingComputeKernel.FUSED_UVM_CACHING, 1, pipelined=False)
    lookup: Any = SimpleNamespace(_emb_modules=[plain, cached, unlocked])
    features = KeyedJaggedTensor(
        ["a", "b", "c", "d"], torch.tensor([1, 2, 3, 4, 5]), lengths=torch.tensor([1, 2, 1, 1])
    )
    lookup_kernels._prefetch(lookup, features)
    assert (plain.fetched, cached.fetched, unlocked.fetched) == ([], [[2, 3, 4]], [])


@pytest.mark.parametrize(
    ("planned", "of_sharder", "ahead"),
    [
        (CacheParams(prefetch_pipeline=True), False, True),
        (CacheParams(prefetch_pipeline=False), True, False),
        (CacheParams(load_factor=0.5), True, True),
        (None, True, True),
        (None, False, False),
    ],
)
def test_a_cache_looks_ahead_where_plan_or_sharder_ask(
    planned: CacheParams | None, of_sharder: bool, ahead: bool
) -> None:
    kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
    plan = {"t": ParameterSharding("table_wise", kernel, [0], cache_params=planned)}
    module: Any = nn.Module()
    module.module_sharding_plan = plan
    module.fused_params = {"prefetch_pipeline": of_sharder}
    assert lookup_kernels.prefetches(module) == ahead


class Counting(nn.Module):
    """A kernel that counts its steps as FBGEMM's of Adam do, and the step that it learned by."""

    def __init__(self) -> None:
        super().__init__()
        self.learning_rate_tensor = torch.tensor(0.5)
        self.iter_cpu, self.iter = torch.zeros(1), torch.zeros(1)
        self.learned: list[tuple[float, float]] = []

    def forward(self, features: Tensor) -> Tensor:
        self.iter.add_(1)
        step, rate = float(self.iter_cpu.add_(1)), float(self.learning_rate_tensor)
        rows = features.clone().requires_grad_()
        rows.register_hook(lambda _: self.learned.append((step, rate)))  # type: ignore[no-untyped-call]
        return rows * 1


@pytest.mark.parametrize("rate", [0.5, 0.25])
def test_a_step_is_counted_once_whatever_its_rate(rate: float) -> None:
    kernel = Counting()
    for step in (1, 2, 3):
        ahead: Any = LookupAhead(nn.Sequential(kernel))
        rows = ahead(torch.ones(3))
        # As a checkpoint has it that is written now.
        assert (int(kernel.iter_cpu), int(kernel.iter)) == (step - 1, step - 1)
        kernel.learning_rate_tensor.fill_(rate)
        rows.sum().backward()
        assert kernel.learned[-1] == (step, rate)
        assert (int(kernel.iter_cpu), int(kernel.iter)) == (step, step)
        kernel.learning_rate_tensor.fill_(0.5)
    assert len(kernel.learned) == 3


FUSED = ParameterSharding("table_wise", "fused", ranks=[0])
SHARDS = [
    ShardMetadata(shard_offsets=[0, 2 * n], shard_sizes=[8, 2], placement="rank:0/cpu")
    for n in range(2)
]
REPLICATED = ParameterSharding("data_parallel", "dense")
COLUMNS = ParameterSharding("column_wise", "fused", [0], EnumerableShardingSpec(SHARDS))


def bags(optimizer: type | None = None, **arguments: Any) -> EmbeddingBagCollection:
    module = EmbeddingBagCollection(configs(EmbeddingBagConfig, "a", 8, 4, name="a"))
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, module.parameters(), {"lr": 0.1, **arguments})
    return module


def fused(optimizer: type) -> FusedEmbeddingBagCollection:
    tables, meta = bags().embedding_bag_configs(), torch.device("meta")
    return FusedEmbeddingBagCollection(tables, optimizer, {"lr": 0.1}, device=meta)


ADAGRAD = {"optimizer": EmbOptimType.EXACT_ADAGRAD}


@pytest.mark.parametrize(
    ("module", "fused_params", "kind"),
    [
        (bags(optim.Adagrad), None, "exact_adagrad"),
        (bags(optim.RowWiseAdagrad), ADAGRAD, ""),
        (bags(optim.LAMB), None, "lamb"),
        (bags(optim.Adam), None, ""),
        (bags(), None, ""),
        (bags(), ADAGRAD, "exact_adagrad"),
        (fused(torch.optim.Adagrad), None, "exact_adagrad"),
        (fused(torch.optim.SGD), None, ""),
    ],
)
def test_updates_whose_kernels_for_cuda_take_plain_batches_alone(
    module: Any, fused_params: Any, kind: str
) -> None:
    assert why_plain_kernels(module, {"a": FUSED}, fused_params, "cpu") == ""
    why = why_plain_kernels(module, {"a": FUSED}, fused_params, "cuda")
    assert (f"CUDA kernels of {kind} " in why) if kind else why == ""


def test_dense_kernels_take_plain_batches_but_for_data_parallel_tables_on_cpu() -> None:
    assert why_plain_kernels(bags(), {"a": REPLICATED}, None, "cpu") == ""
    assert "dense kernels" in why_plain_kernels(bags(), {"a": REPLICATED}, None, "cuda")
    places = {"a": ParameterSharding("table_wise", "dense", ranks=[0])}
    assert "dense kernels" in why_plain_kernels(bags(), places, None, "cpu")


def test_sequences_whose_tables_clip_get_plain_batches_on_a_gpu_too() -> None:
    clipping = {"gradient_clipping": True, "max_gradient": 0.1}
    for params, words in ((clipping, "clips the gradient of each row"), (None, "")):
        clipped = clipped_tables(sequences("a"), {"t_a": FUSED}, params)
        sharded: Any = SimpleNamespace(_groups=None, _device_type="cuda", clipped=clipped)
        why = ExactShardedEmbeddingCollection._why_plain(sharded)
        assert (words in why) if words else why == ""


MOMENTUM = torch.optim.SGD, {"momentum": 0.9}, {}


@pytest.mark.parametrize(
    ("kernel", "device", "optimizer", "arguments", "fused_params", "message"),
    [
        *(
            (kernel, "cuda", *MOMENTUM, "exact_sgd kernels ignore the argument 'momentum'")
            for kernel in ("fused", "fused_uvm", "fused_uvm_caching")
        ),
        ("fused", "cpu", *MOMENTUM, "exact_sgd kernels ignore .*momentum"),
        ("fused", "cpu", optim.RowWiseAdagrad, {"weight_decay": 0.1}, {}, "CPU kernels .*'weight_"),
        ("fused", "cpu", optim.RowWiseAdagrad, {"max_norm": 1.0}, {}, "CPU kernels ignore .*'max_"),
        ("fused", "cpu", None, {}, {"weight_decay": 0.1}, "ignore .*weight_decay"),
    ],
)
def test_arguments_that_do_nothing_are_refused(
    kernel: str, device: str, optimizer: Any, arguments: Any, fused_params: Any, message: str
) -> None:
    params = {"a": ParameterSharding("table_wise", kernel, ranks=[0])}
    with pytest.raises(SetupError, match=f"table 'a': .*{message}"):
        check_updates(bags(optimizer, **arguments), params, fused_params, torch.device(device))


def test_optimizers_without_cpu_kernels_are_refused_on_cpus_alone() -> None:
    module = bags(optim.Adam)
    check_updates(module, {"a": FUSED}, None, torch.device("cuda"))
    with pytest.raises(SetupError, match="no CPU kernels for the optimizer 'adam'"):
        check_updates(module, {"a": FUSED}, None, torch.device("cpu"))


@pytest.mark.parametrize(
    ("sharding", "optimizer", "arguments", "message"),
    [
        (FUSED, optim.RowWiseAdagrad, {"lr": 0.1}, ""),
        (FUSED, torch.optim.SGD, {}, "FBGEMM's default of 0.01"),
        (REPLICATED, torch.optim.SGD, {"lr": 0.1}, "ignores apply_optimizer_in_backward"),
        (COLUMNS, optim.RowWiseAdagrad, {"lr": 0.1}, "row-wise optimizer on column shards"),
    ],
)
def test_updates_that_differ_from_torch_are_warned_of(
    sharding: ParameterSharding,
    optimizer: Any,
    arguments: Any,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = bags()
    apply_optimizer_in_backward(optimizer, module.parameters(), arguments)
    check_updates(module, {"a": sharding}, None, torch.device("cpu"))
    assert [message in text for text in caplog.messages] == [True] * bool(message)
