"""Models that read deduplicated ids by themselves: modules of embeddings alone give all rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.api import (
    ExactEmbeddingBagCollectionSharder,
    ExactShardedEmbeddingBagCollection,
)
from recd_plugins.drop_in.dedup import Dedup
from recd_plugins.errors import ExactnessError

Read = Callable[[KeyedJaggedTensor], object]
METHODS = {name: each for name, each in vars(KeyedJaggedTensor).items() if callable(each)}


def as_ever() -> bool:
    """Whether the class has the methods that TorchRec gave it."""
    return all(vars(KeyedJaggedTensor)[name] is each for name, each in METHODS.items())


class Model(nn.Module):
    """Looks up ``clicks`` and ``views``, and reads what a test says besides."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        names = ["clicks", "views"]
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name, embedding_dim=4, num_embeddings=10, feature_names=[name]
                )
                for name in names
            ]
        )
        self._read = read

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        self._read(kjt)
        return self.bags(kjt).values()


def batch() -> KeyedJaggedTensor:
    """Equal rows of ``clicks``, other ones of ``views``."""
    ids = torch.tensor([3, 4] * 6 + [1, 2, 3, 4, 5, 6])
    return KeyedJaggedTensor(["clicks", "views"], ids, lengths=torch.tensor([2] * 6 + [1] * 6))


REFUSED: dict[str, Read] = {
    ".values()": lambda kjt: kjt.values(),
    ".lengths()": lambda kjt: kjt.lengths(),
    ".offsets()": lambda kjt: kjt.offsets(),
    ".length_per_key()": lambda kjt: kjt.length_per_key(),
    ".to_dict()": lambda kjt: kjt.to_dict(),
    "['clicks']": lambda kjt: kjt["clicks"],
    ".split()": lambda kjt: kjt.split([1, 1])[0].lengths(),
    ".permute()": lambda kjt: kjt.permute([1, 0]).lengths(),
    ".flatten_lengths()": lambda kjt: kjt.flatten_lengths().values(),
}
TAKEN: dict[str, Read] = {
    "what stays as it is": lambda kjt: kjt["views"].values(),
    "no ids": lambda kjt: (kjt.keys(), kjt.stride(), kjt.device()),
    "knowing": lambda kjt: (kjt.inverse_indices_or_none(), kjt.values()),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_read_is_refused_with_its_line(what: str) -> None:
    model = Model(REFUSED[what])
    dedup = Dedup(model)
    plain, stored = batch(), dedup.batch(batch())
    assert stored.values().numel() < plain.values().numel(), "outside of the model anybody may"
    model(plain)
    with pytest.raises(ExactnessError, match=r"test_own_reads\.py:\d+ ") as caught:
        model(stored)
    assert f"({what})" in str(caught.value)
    assert as_ever()


@pytest.mark.parametrize("what", TAKEN)
def test_what_is_the_same_may_be_read(what: str) -> None:
    model = Model(TAKEN[what])
    stored = Dedup(model).batch(batch())
    for _ in range(12):
        model(stored)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert as_ever()


def test_a_model_that_fails_fails_by_its_own_error() -> None:
    def fail(kjt: KeyedJaggedTensor) -> None:
        raise ValueError(f"of {len(kjt.keys())}")

    model = Model(fail)
    stored = Dedup(model).batch(batch())
    with pytest.raises(ValueError, match="of 2"):
        model(stored)
    assert as_ever()


def test_other_threads_may_read_meanwhile() -> None:
    counted = []

    def read(kjt: KeyedJaggedTensor) -> None:
        thread = threading.Thread(target=lambda: counted.append(kjt.values().numel()))
        thread.start()
        thread.join()

    model = Model(read)
    model(Dedup(model).batch(batch()))
    assert counted == [8]


class CountingBags(ExactShardedEmbeddingBagCollection):
    """A sharded module of a plugin's, in a package of any name."""

    seen = seen_by_kernels = 0

    def distribute(self, ctx: Any, features: KeyedJaggedTensor) -> Any:
        self.seen += ids_in(features)
        self.seen_by_kernels += ids_in_a_kernel(features)
        return super().distribute(ctx, features)


def ids_in(features: KeyedJaggedTensor) -> int:
    return features.values().numel()


# Kernels of a plugin are in another package than the sharded module that calls them.
ids_in_a_kernel = FunctionType(ids_in.__code__, {"__name__": "acme_kernels.rows"})


class CountingSharder(ExactEmbeddingBagCollectionSharder):
    @property
    def sharded_module_type(self) -> type[CountingBags]:
        return CountingBags


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("reads", [False, True])
def test_sharded_modules_of_plugins_may_read_what_they_send(one_rank: None, reads: bool) -> None:
    model = Model(REFUSED[".values()"] if reads else lambda kjt: None)
    dedup, sharder = Dedup(model), CountingSharder({})
    places = {name: row_wise(compute_kernel="fused") for name in ("clicks", "views")}
    plan = construct_module_sharding_plan(
        model.bags, places, sharder, local_size=1, world_size=1, device_type="cpu"
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    model.bags = sharder.shard(model.bags, plan, env, torch.device("cpu"))
    stored = dedup.batch(batch())
    if reads:  # the model is none of it, though it is of the same package
        with pytest.raises(ExactnessError, match=r"\.values\(\)"):
            model(stored)
        return
    assert torch.equal(model(stored), model(batch()))
    assert model.bags.seen == model.bags.seen_by_kernels == 8 + 18
