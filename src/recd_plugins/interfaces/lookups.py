"""What a wrapper of a dataset may ask: which rows of which tables samples look up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recd_plugins.interfaces.table_part import TableStrategy
from recd_plugins.values.rows import Rows, Table


@dataclass(frozen=True, eq=False)
class FeatureLookups:
    """The ids that rows of data look up by one feature, lists that are the same stored once.

    Attributes:
        ids: int64 ``[num_ids]``, after preprocessing; not checked against their table.
        offsets: ``[num_lists + 1]``: where in ``ids`` each list starts and ends; the first is 0.
        inverse: int64 ``[num_rows]``: the list of each row; None where list i is that of row i.
    """

    ids: NDArray[np.int64]
    offsets: NDArray[np.int64] | NDArray[np.int32]
    inverse: NDArray[np.int64] | None


class Lookups(ABC):
    """What a registry knows of the model that it has prepared, and of what samples look up."""

    @property
    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """The model's tables.

        Raises:
            SetupError: no model is prepared.
        """

    @property
    @abstractmethod
    def parts(self) -> Sequence[TableStrategy]:
        """What sharding and cache entries do to the tables.

        Raises:
            SetupError: no model is prepared.
        """

    @abstractmethod
    def of(self, rows: Rows, features: Sequence[str]) -> Mapping[str, FeatureLookups]:
        """What ``rows`` look up by each of ``features``, after preprocessing.

        Raises:
            DataError: a feature is missing or damaged.
            PluginError: a step of preprocessing failed.
        """
