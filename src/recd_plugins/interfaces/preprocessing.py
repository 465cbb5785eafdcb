"""Kind ``preprocessing``: the values of a jagged feature become other values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from recd_plugins.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from torch import Tensor


class Preprocessing(Plugin, ABC):
    """A transform of one feature. It must treat equal rows equally: it runs on unique rows only."""

    kind: ClassVar[str] = "preprocessing"

    @abstractmethod
    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """One feature in jagged form to the same number of rows in jagged form.

        Args:
            values: ids of all rows, int64 ``[num_values]``.
            offsets: where rows start and end in ``values``, integer ``[num_rows + 1]``, from 0.

        Returns:
            New values and offsets. ``values`` and ``offsets`` themselves are left as they are.
        """
