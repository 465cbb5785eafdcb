"""Kind ``converter``: a record batch becomes a ``Batch`` of tensors, deduplicated or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from recd_plugins.interfaces.plugin import Plugin
from recd_plugins.values.rows import FeatureSchema, Rows

if TYPE_CHECKING:
    from recd_plugins.values.batch import Batch


class Converter(Plugin, ABC):
    """Turns Arrow columns into jagged tensors: the form of a feature changes, never a value."""

    kind: ClassVar[str] = "converter"
    #: Name of a converter that keeps every row, to advise where deduplication does not pay.
    plain: ClassVar[str] = ""
    #: Whether ``fit`` was called; who calls it sets it.
    is_fitted: bool = False

    def fit(self, sample: Rows, schema: FeatureSchema) -> None:
        """Look at the first batch of the data, the same on every rank, before ``convert``.

        Called once, and again never: a converter without decisions to make leaves it out.
        """

    def dedupe_factors(self) -> Mapping[str, float]:
        """Ids over ids that are stored, by deduplicated feature, as ``fit`` measured it."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Every attribute: readers take over what ``fit`` decided, and do not fit again.

        Override it where one cannot be pickled and is made anew when it is missing.
        """
        return {name: value for name, value in vars(self).items() if name != "options"}

    @abstractmethod
    def convert(self, rows: Rows, schema: FeatureSchema) -> Batch:
        """Every sparse feature of ``schema`` stands in the result once.

        In ``kjt``, in one IKJT, or in one partial IKJT.

        Raises:
            DataError: a null, a missing column or a wrong type, with file, column, row and value.
        """
