"""Kind ``sharding``: where the rows of a table live."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from recd_plugins.interfaces.plugin import Plugin
from recd_plugins.values.rows import Table

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs

    from recd_plugins.interfaces.lookup_kernels import LookupKernels
    from recd_plugins.interfaces.setting import PlanContext
    from recd_plugins.interfaces.table_part import TableStrategy


class SharderArguments(NamedTuple):
    """What a sharder of a plugin is made with, as the built-in ones are.

    Attributes:
        fused_params: FBGEMM's, of the registry or of the trainer.
        kernels: of tables that TorchRec's kernels are not to look up.
        coalesced: tables whose ids are made unique before they are sent.
        qcomm_codecs_registry: TorchRec's, of ``training.wire`` or of the trainer. Where there is
            one, a sharder that was not made with it is refused.
    """

    fused_params: dict[str, Any]
    kernels: tuple[LookupKernels, ...]
    coalesced: frozenset[str]
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None


class Sharding(Plugin, ABC):
    """Decides the sharding of the tables that its registry entry names.

    Overriding nothing leaves the tables to the planner.
    """

    kind: ClassVar[str] = "sharding"

    #: Whether each rank holds these tables whole. Their features then travel without
    #: deduplication, in an EmbeddingBagCollection of their own: TorchRec's data-parallel kernels
    #: do not take variable batches.
    replicates: ClassVar[bool] = False

    @classmethod
    def offers(
        cls,
        tables: Sequence[Table],  # noqa: ARG003
        setting: PlanContext,  # noqa: ARG003
    ) -> Sequence[Mapping[str, Any]]:
        """Options with which a chooser may try this plugin for tables that are alike.

        ``{}`` are the defaults; nothing, the default, keeps it out. Each offer is made, prepared
        and planned to predict its step, so only what may be the best for these tables is worth
        offering, and what the plugin does beside sharding by TorchRec's types has to be in the
        ``work`` and the memory of its part. One rank asks for all.

        Args:
            tables: of one module type, which are looked up alike.
            setting: of the model. The profile of its data has the distinct ids of a batch of all
                tables that are chosen for, whether they are coalesced or not.
        """
        return ()

    @property
    def coalesces(self) -> bool:
        """Whether each id of these tables is sent once a batch: docs/coalescing.md."""
        return False

    @property
    def may_replicate(self) -> bool:
        """Whether the planner may have small tables of these on every rank where it would not.

        Without it, it may so have bags of plain batches on CPU. It does where the dense optimizer
        has the rule of the tables', which the built-in loop's has.
        """
        return False

    def id_limit(self, table: Table) -> int | None:
        """Return the bound that ids of a table must stay below; None allows any 64-bit id.

        A plugin whose ``rewrite`` maps ids to rows by itself widens it. Ids are checked where
        batches are made.
        """
        return table.num_embeddings

    def rewrite(
        self,
        model: nn.Module,
        tables: Sequence[Table],  # noqa: ARG002
        setting: PlanContext,  # noqa: ARG002
    ) -> nn.Module:
        """Replace modules of ``model`` before planning; returns the model.

        Every rank calls it by itself and must come to the same.
        """
        return model

    def part(
        self,
        tables: Sequence[Table],  # noqa: ARG002
        setting: PlanContext,  # noqa: ARG002
    ) -> TableStrategy | None:
        """What it does to ``tables`` beyond sharding them by TorchRec's types; None: nothing.

        Called after ``rewrite``, and for a model that is never rewritten. Every rank calls it by
        itself and must come to the same.
        """
        return None

    def constraints(
        self,
        tables: Sequence[Table],  # noqa: ARG002
    ) -> Mapping[str, ParameterConstraints]:
        """The planner's constraints by table name."""
        return {}

    def sharders(
        self,
        arguments: SharderArguments,  # noqa: ARG002
    ) -> Sequence[ModuleSharder[nn.Module]]:
        """Sharders for module types that ``rewrite`` put in; the built-in ones stay."""
        return ()
