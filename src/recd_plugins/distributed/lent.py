"""What TorchRec's sharders of a trainer lend to the exact ones that take their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs

from recd_plugins.errors import SetupError
from recd_plugins.registry import Registry

Codecs = dict[str, QuantizedCommCodecs]


@dataclass(frozen=True)
class Lent:
    """Arguments of one of TorchRec's two sharders, as a trainer chose them.

    Attributes:
        fused_params: FBGEMM's; None where the trainer left them to others.
        qcomm_codecs_registry: TorchRec's.
        use_index_dedup: of the sharder of EmbeddingCollections.
    """

    fused_params: Mapping[str, Any] | None
    qcomm_codecs_registry: Codecs | None
    use_index_dedup: bool = False

    @classmethod
    def by(
        cls,
        base: Sequence[ModuleSharder[nn.Module]],
        stock: type[EmbeddingBagCollectionSharder] | type[EmbeddingCollectionSharder],
        fused_params: Mapping[str, Any] | None,
        qcomm_codecs_registry: Codecs | None,
    ) -> Lent:
        """What the sharder of type ``stock`` in ``base`` lends, with what was said apart from it.

        Raises:
            SetupError: the sharder in ``base`` is no plain one of TorchRec's, or an argument is
                there twice.
        """
        found = [sharder for sharder in base if sharder.module_type is stock().module_type]
        if not found:
            return cls(fused_params, qcomm_codecs_registry)
        sharder: Any = found[-1]
        module = sharder.module_type.__name__
        if type(sharder) is not stock:
            raise SetupError(
                f"base has a {type(sharder).__name__} for {module}, and only TorchRec's "
                f"{stock.__name__} can be joined with the exact one: take it out of base, or put "
                f"it in place of the one for {module} in what sharders() returns, without sharding "
                "and cache entries for its tables"
            )
        # Private, torchrec 1.8: an argument that the exact sharders do not take.
        if getattr(sharder, "_sharded_module_order_overwrite", None):
            raise SetupError(
                f"the {stock.__name__} in base has a sharded_module_order_overwrite, which cannot "
                "be joined with the exact sharder: leave it away"
            )
        lent: dict[str, Any] = {
            "fused_params": sharder.fused_params,
            "qcomm_codecs_registry": sharder.qcomm_codecs_registry,
        }
        said: dict[str, Any] = {
            "fused_params": fused_params,
            "qcomm_codecs_registry": qcomm_codecs_registry,
        }
        for name, value in said.items():
            if value and lent[name]:
                raise SetupError(
                    f"{name} is an argument of sharders() and of the {stock.__name__} in base: "
                    "leave one of the two away"
                )
        return cls(
            **{name: said[name] or value for name, value in lent.items()},
            # Private, torchrec 1.6 to 1.9.
            use_index_dedup=getattr(sharder, "_use_index_dedup", False),
        )

    def check_optimizer(self, registry: Registry, *, file_counts: bool) -> None:
        """Refuse two optimizers for a table: one of the trainer's fused_params, one of the file.

        Args:
            registry: with its entries of optimizers, which tables bring.
            file_counts: whether ``training.optimizer`` is one that the file names for this trainer.

        Raises:
            SetupError: names both.
        """
        optimizer = (self.fused_params or {}).get("optimizer")
        if optimizer is None:
            return
        where = [
            f"{registry.path}:{entry.line} {entry.field}: {entry.plugin.name}"
            for entry in registry.entries("optimizer")
        ]
        if file_counts:
            where.append(f"{registry.path}: training.optimizer: {registry.training.optimizer}")
        if where:
            raise SetupError(
                f"{where[0]}, and the trainer's fused_params name {optimizer}: leave one of the "
                "two away; entries may be of all tables"
            )

    def over(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """FBGEMM's parameters: ``params``, but for what the trainer chose.

        A trainer's optimizer has rates of its own, so nothing of another's goes with it.
        """
        chosen = self.fused_params or {}
        return dict(chosen) if "optimizer" in chosen else {**params, **chosen}
