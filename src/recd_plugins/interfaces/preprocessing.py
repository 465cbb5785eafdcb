"""Kinds ``converter`` and ``preprocessing``: rows become tensors, and values other values."""

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
    """Turns Arrow columns into jagged tensors. It changes the form of features, never values."""

    kind: ClassVar[str] = "converter"
    #: Whether ``fit`` was called; set by the caller.
    is_fitted: bool = False

    def fit(self, sample: Rows, schema: FeatureSchema) -> None:
        """See the first batch of the data, the same on every rank, once before ``convert``."""

    def dedupe_factors(self) -> Mapping[str, float]:
        """Return ids over stored ids by deduplicated feature, as ``fit`` measured it."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Return every attribute, so that readers have the decisions of ``fit``.

        Override it if an attribute cannot be pickled and is made anew when missing.
        """
        return {name: value for name, value in vars(self).items() if name != "options"}

    @abstractmethod
    def convert(self, rows: Rows, schema: FeatureSchema) -> Batch:
        """Return a batch with each sparse feature once: in ``kjt``, one IKJT or one partial IKJT.

        Raises:
            DataError: a null, a missing column or a wrong type, with file, column, row and value.
        """


Scope = Literal["id", "row"]
Values = Literal["ids", "numbers"]
#: Unknown ids that are counted, at most.
MOST_UNKNOWN = 1_000_000


class Preprocessing(Plugin, ABC):
    """A transform of one feature. It runs on unique rows only, so equal rows give equal results.

    Attributes:
        scope: ``"id"`` if each value maps to one value by itself, so that rows may go on sharing
            values; else ``"row"``.
        takes: ``"ids"`` for sparse features, int64; ``"numbers"`` for dense ones, float32 or
            float64, one per row. An instance may take less than its class.
        width: numbers made of one number of a dense feature.
        fit_rows: first rows of the training split that ``fit`` sees; None for all.
        fits_together: whether one instance is fitted to all features of an entry and transforms
            them; else each has its own copy.
    """

    kind: ClassVar[str] = "preprocessing"
    scope: ClassVar[Scope] = "row"
    takes: tuple[Values, ...] = ("ids",)
    width: int = 1
    fit_rows: int | None = 100_000
    fits_together: bool = False
    #: Fitted instance of each feature of the entry; set by the caller of ``fit``.
    fitted: Mapping[str, Preprocessing] | None = None
    #: If a set: ``transform`` of a vocabulary adds up to MOST_UNKNOWN out-of-vocabulary ids to it.
    #: Set by the caller that scores.
    unknown_ids: set[int] | None = None

    @property
    def num_ids(self) -> int | None:
        """Number of ids that it makes of a sparse feature, from 0; None if unknown.

        Known before ``fit``. Smaller tables and a second such entry of a feature are refused.
        """
        return None

    def fit(self, feature: str, rows: Iterator[tuple[Tensor, Tensor]]) -> None:
        """See the training rows of a feature before ``transform``, the same on every rank.

        Called once per feature. Decisions are kept in attributes and in ``identity``.

        Args:
            feature: its name.
            rows: values and offsets as for ``transform``, some rows at a time, after the entries
                before this one. Do not change them.
        """

    def fitted_state(self) -> Mapping[str, Tensor]:
        """Return the decisions of ``fit`` as tensors by name, for checkpoints; text as uint8.

        Override it together with ``load_fitted_state``. Resumed runs and scoring load it instead of
        fitting; without it they fit anew and compare ``identity``.
        """
        return {}

    def load_fitted_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore ``fitted_state``, given as CPU tensors, as if ``fit`` had been called."""

    def __getstate__(self) -> dict[str, Any]:
        """Return every attribute, so that readers have vocabularies and tables.

        Override it if an attribute cannot be pickled and is made anew when missing.
        """
        return {name: value for name, value in vars(self).items() if name != "options"}

    @abstractmethod
    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Transform one feature in jagged form; the number of rows stays.

        Args:
            values: ids of all rows, int64 ``[num_values]``; or numbers, float32, or float64 for
                stored types with more digits.
            offsets: start and end of rows in ``values``, integer ``[num_rows + 1]``, from 0.

        Returns:
            New values of the same dtype (numbers: float32 or float64) and new offsets. The
            arguments are not changed.
        """

    def original_values(self) -> Sequence[Any] | None:
        """Return the value of each id of a vocabulary, or None.

        An id of many values, or none, has None.
        """
        return None

    def kept_lengths(self, lengths: Tensor) -> Tensor | None:
        """Return how many values each row keeps if the transform only cuts rows at their end.

        Rows that share values are then shortened without a copy.

        Args:
            lengths: of rows, integer ``[num_rows]``.

        Returns:
            Lengths of the same dtype, at most ``lengths``; None for any other transform.
        """
        return None
