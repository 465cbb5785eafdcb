"""What FBGEMM's kernels for CUDA take of a batch, by the update of their tables."""

from __future__ import annotations

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.small_registry import MakeRegistry
from torchrec import optim
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from recd_plugins.distributed.process_groups import gathers_equal_sizes
from recd_plugins.distributed.row_updates import plain_updates, refuse_coalesced_updates, why_not
from recd_plugins.errors import RegistryError, SetupError
from recd_plugins.planning.prepare_entries import prepare_entries
from recd_plugins.planning.setting import setting_of
from recd_plugins.planning.topologies import load_topology


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


def test_such_tables_are_not_coalesced() -> None:
    refuse_coalesced_updates({})
    with pytest.raises(SetupError, match=r"tables a, c are to be coalesced .* exact_adagrad, lamb"):
        refuse_coalesced_updates({"a": "exact_adagrad", "c": "lamb"})


def test_entries_that_coalesce_such_tables_are_refused_with_their_line(
    make_registry: MakeRegistry,
) -> None:
    rate = {"learning_rate": 0.1}
    registry = make_registry(
        sharding=[{"use": "torchrec.row_wise", "tables": ["t_*"], "options": {"coalesce": True}}],
        optimizers=[{"use": "torchrec.adagrad", "tables": ["t_a"], "options": rate}],
        pooling=None,
    )
    model = bags(t_a=None, t_b=None)
    setting = setting_of(registry, model, load_topology("dgx-a100-80g"))
    with pytest.raises(
        RegistryError, match=r"registry.yaml:\d+ sharding\[0\]: .* t_a are to be coal"
    ):
        prepare_entries(registry, model, setting, "cuda")
    prepare_entries(registry, bags(t_a=None, t_b=None), setting, "cpu")


def test_an_update_without_a_state_to_show_is_refused() -> None:
    assert "shows no state of lars_sgd" in why_not(EmbOptimType.LARS_SGD, "cuda")
    assert "for CUDA alone" in why_not(EmbOptimType.LAMB, "cpu")
    assert why_not(EmbOptimType.LAMB, "cuda") == why_not(EmbOptimType.EXACT_SGD, "cpu") == ""


def test_a_module_on_one_rank_gathers_nothing() -> None:
    assert gathers_equal_sizes(None, "cpu")
    assert not gathers_equal_sizes(None, "cuda")
