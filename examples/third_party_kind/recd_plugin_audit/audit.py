"""Plugin kind ``audit``: plugins that inspect the ids looked up in tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from recd_plugins.api import Callback, RunBatch, RunStart

if TYPE_CHECKING:
    from torch import Tensor


class Audit(Callback, ABC):
    """Inspects the ids of each batch, for the tables in its registry entry, on every rank.

    This is a training callback. A subclass that overrides ``on_start`` must call
    ``super().on_start``.
    """

    kind: ClassVar[str] = "audit"

    def on_start(self, start: RunStart) -> None:
        self.features = {
            table.name: table.features for table in start.tables if table.name in start.claimed
        }

    def on_batch(self, batch: RunBatch) -> None:
        for table, features in self.features.items():
            for feature in features:
                self.note(table, batch.ids(feature))

    @abstractmethod
    def note(self, table: str, ids: Tensor) -> None:
        """Process the ids of one feature in one batch.

        Args:
            table: name of the table that the ids are looked up in.
            ids: int64 ``[num_ids]``. Do not modify this tensor.
        """
