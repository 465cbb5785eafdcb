"""Bags and a sharder of a plugin train as TorchRec's do, and count ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.runtime.plugin_modules import load_file
from recd_plugins.training.session import session

REGISTRY = """
version: 1
dataset: {use: dlrm.random, options: {rows: 256, sparse: {user: 90, item: 90}}}
converter: {use: recd.kjt}
sharding:
  - {use: SHARDING, tables: [t_user]}
  - {use: torchrec.row_wise, tables: [t_item]}
cache: [{use: scars.cache, tables: [t_item], options: {share: 0.2, policy: lru}}]
model: {embedding_dim: 4, num_embeddings: 100, bottom_mlp: [4], top_mlp: [4]}
training: {batch_size: 16, ranks: 2, device: cpu, evaluate: false}
"""

BAGS = '''
"""Bags that count the ids which they are asked for."""

from torchrec import EmbeddingBagCollection

from recd_plugins.api import ExactEmbeddingBagCollectionSharder, ExactShardedEmbeddingBagCollection


class SeenBags(EmbeddingBagCollection):
    """The tables of other bags, with their parameters as they are: on the meta device too."""

    def __init__(self, bags):
        super().__init__(bags.embedding_bag_configs(), bags.is_weighted(), bags.device)
        self.embedding_bags = bags.embedding_bags


class ShardedSeenBags(ExactShardedEmbeddingBagCollection):
    seen = 0

    def distribute(self, ctx, features):
        self.seen += features.values().numel()
        return super().distribute(ctx, features)


class SeenSharder(ExactEmbeddingBagCollectionSharder):
    @property
    def module_type(self):
        return SeenBags

    @property
    def sharded_module_type(self):
        return ShardedSeenBags
'''
SEEN = '''
"""acme.seen: counts ids."""

from recd_plugins.api import Sharding, hookimpl


class Seen(Sharding):
    """Counts the ids of the modules that have its tables."""

    name = "acme.seen"

    def rewrite(self, model, tables, context):
        from torchrec import EmbeddingBagCollection

        from .bags import SeenBags

        names = {table.name for table in tables}
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, EmbeddingBagCollection):
                    if names & {config.name for config in child.embedding_bag_configs()}:
                        setattr(parent, name, SeenBags(child))
        return model

    def sharders(self, arguments):
        from .bags import SeenSharder

        params, kernels, coalesced, codecs = arguments
        return [SeenSharder(params, codecs, kernels=kernels, coalesced=coalesced)]


@hookimpl
def register_shardings():
    return [Seen]
'''


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    """A folder with the plugin."""
    for name, code in (("bags", BAGS), ("__init__", SEEN)):
        path = tmp_path / "acme_seen" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    return tmp_path


def test_rewritten_bags_train_as_before(plugins: Path) -> None:
    losses = []
    for sharding in ("acme.seen", "torchrec.planner"):
        registry = plugins / "registry.yaml"
        registry.write_text(REGISTRY.replace("SHARDING", sharding))
        with session(registry, plugins_dir=plugins, overrides={}) as trainer:
            losses.append(trainer.train("plugins").losses)
    assert losses[0] == losses[1]


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_bags_of_ones_own_see_what_is_sent_and_looked_up(one_rank: None, plugins: Path) -> None:
    bags: Any = load_file("acme_seen_bags", plugins / "acme_seen" / "bags.py")
    looked_up = []

    class LooksUp(bags.ShardedSeenBags):
        def look_up(self, ctx: Any, input: Any) -> Any:
            looked_up.append(input[0].values().tolist())
            return super().look_up(ctx, input)

    class Sharder(bags.SeenSharder):
        @property
        def sharded_module_type(self) -> type[LooksUp]:
            return LooksUp

    config = EmbeddingBagConfig(
        name="t", num_embeddings=8, embedding_dim=4, feature_names=["clicks"]
    )
    module = bags.SeenBags(EmbeddingBagCollection(tables=[config]))
    sharder = Sharder({})
    plan = construct_module_sharding_plan(
        module, {"t": row_wise()}, sharder, local_size=1, world_size=1, device_type="cpu"
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = sharder.shard(module, plan, env, torch.device("cpu"))
    ids = torch.tensor([1, 5, 2])
    rows = sharded(KeyedJaggedTensor(["clicks"], ids, lengths=torch.tensor([2, 1])))
    assert rows.values().shape == (2, 4)
    assert sharded.seen == 3
    assert looked_up == [[1, 5, 2]]
