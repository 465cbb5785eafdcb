"""Plugin kinds ``converter`` and ``preprocessing``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from recd_plugins.interfaces.plugin import Plugin
from recd_plugins.interfaces.rows import FeatureSchema, Rows

if TYPE_CHECKING:
    from torch import Tensor

    from recd_plugins.interfaces.batch import Batch


class Converter(Plugin, ABC):
    """Turns Arrow columns into jagged tensors without changing values."""

    kind: ClassVar[str] = "converter"
    #: Whether ``fit`` was called; set by the caller.
    is_fitted: bool = False

    def fit(self, sample: Rows, schema: FeatureSchema) -> None:
        """Inspect the first batch of the data, the same on every rank, before ``convert``."""

    def dedupe_factors(self) -> Mapping[str, float]:
        """Return ids over stored ids by deduplicated feature, measured by ``fit``."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes for readers; leave out those that cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name != "options"}

    @abstractmethod
    def convert(self, rows: Rows, schema: FeatureSchema) -> Batch:
        """Return a batch with each sparse feature in ``kjt``, one IKJT or one partial IKJT.

        Raises:
            DataError: a null, a missing column or a wrong type, with file, column, row and value.
        """


Scope = Literal["id", "row"]
Values = Literal["ids", "numbers"]
#: Largest number of out-of-vocabulary ids that are counted.
MOST_UNKNOWN = 1_000_000


class Preprocessing(Plugin, ABC):
    """Transforms the unique rows of one feature; equal rows must give equal results.

    Attributes:
        scope: ``"id"`` if each value maps to one value by itself, else ``"row"``.
        takes: ``"ids"`` for sparse features, int64; ``"numbers"`` for dense features, float32 or
            float64, one per row.
        width: numbers returned for one number of a dense feature.
        fit_rows: first rows of the training split for ``fit``; None for all.
        fits_together: whether the features of an entry share one instance.
    """

    kind: ClassVar[str] = "preprocessing"
    scope: ClassVar[Scope] = "row"
    takes: tuple[Values, ...] = ("ids",)
    width: int = 1
    fit_rows: int | None = 100_000
    fits_together: bool = False
    #: Fitted instance of each feature of the entry; set by the caller of ``fit``.
    fitted: Mapping[str, Preprocessing] | None = None
    #: A vocabulary adds up to MOST_UNKNOWN out-of-vocabulary ids to this set of the caller.
    unknown_ids: set[int] | None = None

    @property
    def num_ids(self) -> int | None:
        """Exclusive bound of the new ids of a sparse feature; None if unknown before ``fit``."""
        return None

    def fit(self, feature: str, rows: Iterator[tuple[Tensor, Tensor]]) -> None:
        """Inspect the training rows of a feature, the same on every rank, before ``transform``.

        Store decisions in attributes, and return them from ``identity``.

        Args:
            feature: name of the feature.
            rows: read-only values and offsets as for ``transform``, after previous entries.
        """

    def fitted_state(self) -> Mapping[str, Tensor]:
        """Return the decisions of ``fit`` as tensors by name, for checkpoints; text as uint8.

        Override it together with ``load_fitted_state``; otherwise resumed runs and scoring fit
        again and compare ``identity``.
        """
        return {}

    def load_fitted_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore ``fitted_state`` from CPU tensors in place of ``fit``."""

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes for readers; leave out those that cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name != "options"}

    @abstractmethod
    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Transform one feature in jagged form without changing the arguments.

        Args:
            values: ids, int64 ``[num_values]``; or numbers, float32 or float64.
            offsets: bounds of rows in ``values``, integer ``[num_rows + 1]``.

        Returns:
            New values of the same dtype (numbers: float32 or float64) and new offsets with the
            same number of rows.
        """

    def original_values(self) -> Sequence[Any] | None:
        """Return the value of each id of a vocabulary, None for ids of many values or none."""
        return None

    def kept_lengths(self, lengths: Tensor) -> Tensor | None:
        """Return the new lengths of rows if the transform only truncates rows, else None.

        Args:
            lengths: lengths of rows, integer ``[num_rows]``.

        Returns:
            Lengths of the same dtype and shape, at most ``lengths``.
        """
        return None
