"""Kind ``audit``: what is noted of the ids that tables are read by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from recd_plugins.api import Callback, RunBatch, RunStart

if TYPE_CHECKING:
    from torch import Tensor


class Audit(Callback, ABC):
    """Sees the ids of the tables that its registry entry names, batch by batch, on every rank.

    It is a callback, so training calls it. A subclass that overrides ``on_start`` calls that of
    this class as well.
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
        """Note what one batch looks up in a table by one feature.

        Args:
            table: its name.
            ids: int64 ``[num_ids]``, to be left as they are.
        """
