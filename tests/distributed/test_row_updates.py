"""What FBGEMM's kernels for CUDA take of a batch, by the update of their tables."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import optim
from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from recd_plugins.compat.row_updates import (
    ClippedGradients,
    check_updates,
    plain_updates,
    why_plain_kernels,
)
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.rank_agreement import gathers_equal_sizes
from recd_plugins.sharding.exact_modules import ExactShardedEmbeddingCollection


def bags(**optimizers: type | None) -> EmbeddingBagCollection:
    """Tables with the optimizers that they bring, by name; without one by None."""
    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=8, embedding_dim=4, feature_names=[f"f_{name}"]
            )
            for name in optimizers
        ]
    )
    for name, optimizer in optimizers.items():
        if optimizer is not None:
            weight = module.embedding_bags[name].weight
            apply_optimizer_in_backward(optimizer, [weight], {"lr": 0.1})
    return module


def test_updates_whose_kernels_for_cuda_take_plain_batches_alone() -> None:
    module = bags(a=optim.Adagrad, b=optim.RowWiseAdagrad, c=optim.LAMB, d=optim.Adam, e=None)
    assert plain_updates(module, None, "cuda") == {"a": "exact_adagrad", "c": "lamb"}
    assert plain_updates(module, None, "cpu") == {}
    own = {"optimizer": EmbOptimType.EXACT_ADAGRAD}
    assert plain_updates(module, own, "cuda").keys() == {"a", "c", "e"}


def test_updates_of_a_fused_collection_are_its_own() -> None:
    def fused(optimizer: type) -> FusedEmbeddingBagCollection:
        configs = bags(a=None, b=None).embedding_bag_configs()
        return FusedEmbeddingBagCollection(
            configs, optimizer, {"lr": 0.1}, device=torch.device("meta")
        )

    assert plain_updates(fused(torch.optim.Adagrad), None, "cuda").keys() == {"a", "b"}
    assert plain_updates(fused(torch.optim.SGD), None, "cuda") == {}


def test_why_batches_are_plain() -> None:
    fused = ParameterSharding("table_wise", "fused", ranks=[0])
    replicated = ParameterSharding("data_parallel", "dense")
    tables = {"a": fused, "b": replicated}
    assert why_plain_kernels({"a": fused}, {}, on_cpu=False) == ""
    assert why_plain_kernels(tables, {}, on_cpu=True) == ""
    assert "dense kernels, those of tables b" in why_plain_kernels(tables, {}, on_cpu=False)
    why = why_plain_kernels({"a": fused}, {"a": "lamb"}, on_cpu=False)
    assert why == "as kernels of lamb for CUDA, those of tables a, take no other"


def test_sequences_whose_tables_clip_get_plain_batches_on_a_gpu_too() -> None:
    tables = EmbeddingCollection(
        tables=[EmbeddingConfig(name="a", num_embeddings=8, embedding_dim=4, feature_names=["f_a"])]
    )
    params = {"a": ParameterSharding("table_wise", "fused", ranks=[0])}
    clipping = {"gradient_clipping": True, "max_gradient": 0.1}
    sharded = object.__new__(ExactShardedEmbeddingCollection)
    clipped = ClippedGradients(tables, params, clipping)
    vars(sharded).update(_groups=None, _on_cpu=False, clipped=clipped)
    assert "clips the gradient of each row" in sharded._why_plain()
    vars(sharded).update(clipped=ClippedGradients(tables, params, None))
    assert sharded._why_plain() == ""


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm", "fused_uvm_caching"])
def test_arguments_that_do_nothing_are_refused_of_all_kernels_of_tables(kernel: str) -> None:
    module = bags(a=optim.SGD)
    weight = module.embedding_bags["a"].weight
    weight._optimizer_kwargs = [{"lr": 0.1, "momentum": 0.9}]
    params = {"a": ParameterSharding("table_wise", kernel, ranks=[0])}
    with pytest.raises(SetupError, match=r"table a: .* do nothing with momentum"):
        check_updates(params, {"a": weight}, None, torch.device("cuda"))


def test_a_module_on_one_rank_gathers_nothing() -> None:
    assert gathers_equal_sizes(None, "cpu")
    assert not gathers_equal_sizes(None, "cuda")
