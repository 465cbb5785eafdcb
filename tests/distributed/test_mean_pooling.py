"""Mean pooling that nobody would divide right is refused before anything is sharded."""

from __future__ import annotations

import pytest
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recd_plugins.compat.mean_pooling import divide_row_wise_tables_only
from recd_plugins.runtime.errors import ExactnessError, SetupError
from recd_plugins.sharding.sharders import ExactEmbeddingBagCollectionSharder


@pytest.mark.parametrize("coalesced", [(), ("mean",)])
def test_means_in_grids(coalesced: tuple[str, ...]) -> None:
    bags = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=pooling.value.lower(),
                num_embeddings=8,
                embedding_dim=4,
                feature_names=[pooling.value],
                pooling=pooling,
            )
            for pooling in (PoolingType.SUM, PoolingType.MEAN)
        ]
    )
    grid = ParameterSharding("grid_shard", "fused", [0])
    sharder = ExactEmbeddingBagCollectionSharder(coalesced=coalesced)
    with pytest.raises(ExactnessError, match=r"^tables mean have mean pooling .* grid_shard, of"):
        sharder.shard(bags, {"sum": grid, "mean": grid}, ShardingEnv.from_local(1, 0))


def test_names_that_torchrec_takes_for_others() -> None:
    """Outputs of a feature of several tables are feature@table."""
    config = EmbeddingBagConfig(
        name="t",
        num_embeddings=8,
        embedding_dim=4,
        feature_names=["clicks", "clicks@7d"],
        pooling=PoolingType.MEAN,
    )
    row_wise = {"t": ParameterSharding("row_wise", "fused", [0])}
    with pytest.raises(
        SetupError, match=r"features clicks@7d have an @ .* mean pooling, for which"
    ):
        divide_row_wise_tables_only(None, [config], row_wise)  # type: ignore[arg-type]
