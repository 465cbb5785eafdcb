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


Scope = Literal["id", "row"]
Values = Literal["ids", "numbers"]
#: Unknown ids that are counted, at most.
MOST_UNKNOWN = 1_000_000


class Preprocessing(Plugin, ABC):
    """A transform of one feature. It must treat equal rows equally: it runs on unique rows only.

    Attributes:
        scope: ``"id"`` where each value becomes one value that depends on nothing else, so that
            rows which share values can go on sharing them; ``"row"`` for all other transforms.
        takes: the features it is for: ``"ids"`` are sparse features, int64; ``"numbers"`` are
            dense ones, float32 or float64, one in each row. An instance may take less than its
            class.
        width: how many numbers one number of a dense feature becomes.
        fit_rows: how many first rows of the training split ``fit`` is shown; None: all.
        fits_together: whether one instance is fitted to all features of an entry, and transforms
            them, as features that share a table may need; else each has a copy of its own.
    """

    kind: ClassVar[str] = "preprocessing"
    scope: ClassVar[Scope] = "row"
    takes: tuple[Values, ...] = ("ids",)
    width: int = 1
    fit_rows: int | None = 100_000
    fits_together: bool = False
    #: What each feature of the entry is transformed by, once ``fit`` was called; who calls it
    #: sets it.
    fitted: Mapping[str, Preprocessing] | None = None
    #: Where it is a set: ids that ``fit`` has not seen, to which ``transform`` adds those it meets,
    #: up to MOST_UNKNOWN. Of a vocabulary; who scores sets it.
    unknown_ids: set[int] | None = None

    @property
    def num_ids(self) -> int | None:
        """How many ids it makes of a sparse feature, from 0 on; None where that is not known.

        It is asked before ``fit``, so options say it. A table with fewer rows is refused before a
        run begins, and so is a second entry of the plugin for one feature, which would number what
        the first made.
        """
        return None

    def fit(self, feature: str, rows: Iterator[tuple[Tensor, Tensor]]) -> None:
        """Look at the training rows of a feature, the same on every rank, before ``transform``.

        Called once for each feature that an entry claims, of a plugin that overrides it. What it
        decides it keeps in attributes, and ``identity`` says what that is.

        Args:
            feature: its name.
            rows: the feature in jagged form, as ``transform`` is given it: some rows at a time, as
                the entries before this one leave them; to be left as they are.
        """

    def fitted_state(self) -> Mapping[str, Tensor]:
        """What ``fit`` decided, as tensors by name. A checkpoint keeps it beside the weights.

        Override it together with ``load_fitted_state``, where there is ``fit``: a run that goes on,
        and who scores by the checkpoint, take it in place of fitting to data that may be gone.
        Without it they fit anew and compare ``identity``. Text is uint8.
        """
        return {}

    def load_fitted_state(self, state: Mapping[str, Tensor]) -> None:
        """Be what the state says, as if ``fit`` had been called.

        Args:
            state: what ``fitted_state`` gave; on the CPU.
        """

    def __getstate__(self) -> dict[str, Any]:
        """Every attribute, so that readers transform as the trainer would: tables, vocabularies.

        Override it where one cannot be pickled and is made anew when it is missing.
        """
        return {name: value for name, value in vars(self).items() if name != "options"}

    @abstractmethod
    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """One feature in jagged form to the same number of rows in jagged form.

        Args:
            values: ids of all rows, int64 ``[num_values]``, or numbers, float32 or, if the stored
                type has more digits, float64.
            offsets: where rows start and end in ``values``, integer ``[num_rows + 1]``, from 0.

        Returns:
            New values of the same dtype (of numbers float32 or float64), and new offsets.
            ``values`` and ``offsets`` themselves are left as they are.
        """

    def original_values(self) -> Sequence[Any] | None:
        """What became each id, by id; None where that is not known.

        Of a vocabulary. An id that many values become, or none, has None.
        """
        return None

    def kept_lengths(self, lengths: Tensor) -> Tensor | None:  # noqa: ARG002
        """How many values each row keeps, of a transform that only cuts rows at their end.

        It is then enough to shorten rows that share values; None for every other transform.

        Args:
            lengths: of the rows, integer ``[num_rows]``.

        Returns:
            Lengths of the same dtype, none longer than before, or None.
        """
        return None
