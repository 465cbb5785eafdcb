"""What TorchRec's sharders of a trainer lend to the exact ones that take their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs

from recd_plugins.errors import SetupError
from recd_plugins.registry import RunConfig

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
        lent = cls.of(sharder)
        said = {
            "fused_params": fused_params,
            "qcomm_codecs_registry": qcomm_codecs_registry,
        }
        for name, value in said.items():
            if value and getattr(lent, name):
                raise SetupError(
                    f"{name} is an argument of sharders() and of the {stock.__name__} in base: "
                    "leave one of the two away"
                )
        return lent.or_else(fused_params, qcomm_codecs_registry)

    @classmethod
    def of(cls, sharder: Any) -> Lent:
        """The arguments of a sharder of TorchRec's in ``base``.

        Raises:
            SetupError: one is there that the exact sharders do not take.
        """
        if getattr(sharder, "_sharded_module_order_overwrite", None):  # private, torchrec 1.8
            raise SetupError(
                f"the {type(sharder).__name__} in base has a sharded_module_order_overwrite, which "
                "cannot be joined with the exact sharder: leave it away"
            )
        return cls(
            sharder.fused_params,
            sharder.qcomm_codecs_registry,
            # Private, torchrec 1.6 to 1.9.
            getattr(sharder, "_use_index_dedup", False),
        )

    def or_else(
        self,
        fused_params: Mapping[str, Any] | None,
        qcomm_codecs_registry: Codecs | None,
    ) -> Lent:
        """The same, with these where it has none."""
        return replace(
            self,
            fused_params=self.fused_params or fused_params,
            qcomm_codecs_registry=self.qcomm_codecs_registry or qcomm_codecs_registry,
        )

    def check_optimizer(self, registry: RunConfig, *, file_counts: bool) -> None:
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


def check_base(base: object) -> None:
    """Refuse what is no list of sharders, before anything of it is changed."""
    if not isinstance(base, Sequence):
        raise SetupError(f"sharders takes a list of sharders as base, not {base!r:.80}")
    for index, each in enumerate(base):
        if isinstance(each, type):
            raise SetupError(
                f"base[{index}] is the class {each.__name__}: give an instance, {each.__name__}()"
            )
        if not isinstance(each, ModuleSharder):
            raise SetupError(f"base[{index}] is {each!r:.80}, and no ModuleSharder")
