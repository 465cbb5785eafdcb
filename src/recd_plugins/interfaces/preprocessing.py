"""Base classes of converter plugins and preprocessing plugins."""

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
    """Converts Arrow columns to jagged tensors without changing values."""

    kind: ClassVar[str] = "converter"
    #: Whether ``fit`` was called; set by the caller.
    is_fitted: bool = False
    #: Features, sparse or dense, that are equal for all rows of a request. Set by ``fit``.
    user_features: tuple[str, ...] = ()

    def fit(self, sample: Rows, schema: FeatureSchema) -> None:
        """Inspect the first training batch, before ``convert``. All ranks get the same batch."""

    def dedupe_factors(self) -> Mapping[str, float]:
        """Return the number of ids before, divided by after, deduplication, keyed by feature."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the picklable attributes, which are sent to reader processes."""
        return {name: value for name, value in vars(self).items() if name != "options"}

    @abstractmethod
    def convert(self, rows: Rows, schema: FeatureSchema) -> Batch:
        """Convert rows to a batch. Each sparse feature is in exactly one of its jagged tensors.

        Raises:
            DataError: a value is null, a column is missing or has the wrong type. The message
                names file, column, row and value.
        """


Scope = Literal["id", "row"]
Values = Literal["ids", "numbers"]
#: Maximum number of distinct out-of-vocabulary ids to count.
MOST_UNKNOWN = 1_000_000


class Preprocessing(Plugin, ABC):
    """Transforms the unique rows of one feature. Equal rows must have equal results.

    Attributes:
        scope: ``"id"`` if each value is mapped to one value independently, else ``"row"``.
        takes: ``"ids"`` for sparse features, int64; ``"numbers"`` for dense features, float32 or
            float64, one per row.
        width: number of output columns for a dense feature.
        fit_rows: number of first rows of the training split that ``fit`` reads; None for all.
        fits_together: whether all features of a registry.yaml entry share one fitted instance.
    """

    kind: ClassVar[str] = "preprocessing"
    scope: ClassVar[Scope] = "row"
    takes: tuple[Values, ...] = ("ids",)
    width: int = 1
    fit_rows: int | None = 100_000
    fits_together: bool = False
    #: Fitted instance of each feature of the entry; set by the caller of ``fit``.
    fitted: Mapping[str, Preprocessing] | None = None
    #: Set of the caller, to which a vocabulary adds up to MOST_UNKNOWN out-of-vocabulary ids.
    unknown_ids: set[int] | None = None

    @property
    def num_ids(self) -> int | None:
        """Exclusive upper bound of the new ids; None if unknown before ``fit``."""
        return None

    def fit(self, feature: str, rows: Iterator[tuple[Tensor, Tensor]]) -> None:
        """Analyze a feature's training rows before ``transform``. All ranks get the same rows.

        Store results, such as bucket borders, in attributes, and return them from ``identity``.

        Args:
            feature: name of the feature.
            rows: pairs of read-only values and offsets as in ``transform``, already transformed by
                previous preprocessing steps of the feature.
        """

    def fitted_state(self) -> Mapping[str, Tensor]:
        """Return the results of ``fit`` as named tensors, for checkpoints. Store text as uint8.

        Override this method together with ``load_fitted_state``. By default, resumed runs and
        scoring call ``fit`` again and compare ``identity``.
        """
        return {}

    def load_fitted_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the results of ``fit`` from CPU tensors. Called instead of ``fit``."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the picklable attributes, which are sent to reader processes."""
        return {name: value for name, value in vars(self).items() if name != "options"}

    @abstractmethod
    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the transformed values and offsets of a feature. Must not modify the arguments.

        Args:
            values: ids, int64 ``[num_values]``, or numbers, float32 or float64.
            offsets: offsets of rows in ``values``, integer ``[num_rows + 1]``.

        Returns:
            ``(values, offsets)``: new values, int64 or for numbers float32 or float64, and offsets
            with the same number of rows.
        """

    def original_values(self) -> Sequence[Any] | None:
        """Return the original value of each vocabulary id, or None without a vocabulary.

        An element is None if the id has several original values or no original value.
        """
        return None

    def kept_lengths(self, lengths: Tensor) -> Tensor | None:
        """Return the lengths of rows after a transform that only truncates rows, else None.

        Args:
            lengths: lengths of rows, integer ``[num_rows]``.

        Returns:
            Lengths of the same dtype and shape, at most ``lengths``.
        """
        return None
