"""Option ``label`` of ``tables.table``: labels of multi-task training, and their values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PositiveFloat, model_validator

from recd_plugin_tables.kinds import ColumnOptions, Leaf, feature_name, is_text, why_not
from recd_plugin_tables.values import Cells, labels_of, numbers_of
from recd_plugins.api import PluginOptions, tasks, text_utils

#: Options that labels and columns with role label have in common.
_OF_COLUMN = ("positive_from", "positive", "missing")


class LabelOptions(PluginOptions):
    """One label of multi-task training: its column, type, weight and loss."""

    name: str = Field(pattern=r"^\w+$", description="Name of the label in metrics and score files.")
    column: str = Field(
        default="", description="Column of the label; empty means that name is also the column."
    )
    type: tasks.TaskType = Field(
        default="binary",
        description="binary: 0 or 1. regression: a number. weighted: 0 or 1. The loss of a "
        "positive row is multiplied by the column in `value`.",
    )
    weight: PositiveFloat = Field(
        default=1.0,
        description="Factor of this label's loss in the total loss. For row weights, see `value`.",
    )
    loss: tasks.TaskLoss | None = Field(
        default=None,
        description="Types binary and weighted always use `bce`. Regression uses `mse` (default) "
        "or `log_mse`, the squared error of log(1 + value).",
    )
    value: str | None = Field(
        default=None,
        description="For type weighted: column with the weight of positive rows, such as "
        "watch_time.",
    )
    positive_from: float | None = Field(
        default=None, description=ColumnOptions.model_fields["positive_from"].description
    )
    positive: tuple[str | float | bool, ...] | None = Field(
        default=None,
        min_length=1,
        description=ColumnOptions.model_fields["positive"].description,
    )
    missing: Literal["error", "drop"] | float | None = Field(
        default=None,
        description="How to handle a missing label: error, drop (the row), or a replacement value. "
        "null: this label's loss and metrics skip the row. Each rank averages the loss over its "
        "labelled rows.",
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = {"column": given}
        if isinstance(given, dict):
            given = dict(given)
            name, column = given.get("name"), given.get("column")
            given["column"] = column or name
            if name is None and isinstance(column, str):
                given["name"] = feature_name(column)
        return given

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        losses = tasks.LOSSES[self.type]
        if self.loss is not None and self.loss not in losses:
            raise ValueError(
                f"loss {self.loss!r} does not suit type {self.type!r}. Use one of: "
                f"{', '.join(map(repr, losses))}"
            )
        if (self.type == "weighted") != (self.value is not None):
            raise ValueError(
                "type 'weighted' needs the column of the weights. Set option 'value'"
                if self.type == "weighted"
                else "option 'value' applies only to type 'weighted'. Remove the option"
            )
        if self.type == "regression" and (self.positive or self.positive_from is not None):
            raise ValueError(
                "'positive' and 'positive_from' do not apply to type 'regression'. Remove them"
            )
        return self

    @property
    def task(self) -> tasks.Task:
        return tasks.Task(
            self.name, self.type, self.weight, self.loss or tasks.LOSSES[self.type][0]
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Source columns of this label."""
        return (self.column,) if self.value is None else (self.column, self.value)

    @property
    def rules(self) -> ColumnOptions:
        """Options of a column with role label that has the same values."""
        given = {name: getattr(self, name) for name in ("positive_from", "positive")}
        return ColumnOptions.model_validate({"as": "label", **given})


def _listed(given: Any) -> Any:
    return [given] if isinstance(given, str | dict) else [] if given is None else given


Labels = Annotated[tuple[LabelOptions, ...], BeforeValidator(_listed)]


def with_one_label(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move a single binary ``label`` of the dataset options to a column with role label."""
    listed = _listed(given.get("label"))
    if not isinstance(listed, list | tuple) or len(listed) != 1:
        return given
    (one,) = listed
    one = {"name": one} if isinstance(one, str) else one
    columns = given.get("columns", {})
    if not isinstance(one, dict) or not isinstance(columns, dict):
        return given
    column = one.get("column") or one.get("name")
    same = one.get("name") in (None, column) and one.get("type", "binary") == "binary"
    if not same or set(one) - {"name", "column", "type", *_OF_COLUMN} or column is None:
        return given
    role = {"as": "label", **{name: one[name] for name in _OF_COLUMN if name in one}}
    rest = {name: value for name, value in given.items() if name != "label"}
    return {**rest, "columns": {**columns, column: role}}


def label_problems(
    labels: Collection[LabelOptions], columns: Mapping[str, ColumnOptions], *, implicit: bool
) -> Iterator[str]:
    """Yield an error message for each conflict of option ``label`` with other options."""
    names = [each.name for each in labels]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"label: name {name!r} is given twice. Set option 'name' of one of them"
    if labels and implicit:
        yield "label: implicit: true makes every row a positive. Remove one of the options"
    for name, use in columns.items():
        if labels and "label" in use.roles:
            yield (
                f"columns.{name}: option 'label' lists the labels. Remove role 'label' here, and "
                "set positive and missing in option 'label'"
            )
        of = next((each.name for each in labels if name in each.columns), None)
        if of is not None and use.feature is not None:
            yield f"columns.{name}: label {of!r} uses this column. Remove its role as a feature"


@dataclass(frozen=True)
class LabelUse:
    """A label, its leaf (column or struct field), and the leaf of its weights."""

    options: LabelOptions
    leaf: Leaf
    value: Leaf | None = None

    @property
    def leaves(self) -> list[Leaf]:
        return [self.leaf] if self.value is None else [self.leaf, self.value]


def plan_labels(
    labels: Collection[LabelOptions], found: Mapping[str, Leaf]
) -> tuple[list[LabelUse], list[str]]:
    """Find the leaf column of each label. Return these columns and a list of error messages."""
    uses, problems = list[LabelUse](), list[str]()
    for each in labels:
        missing = [name for name in each.columns if name not in found]
        for name in missing:
            meant = text_utils.did_you_mean(name, found) or "."
            problems.append(f"label {each.name!r}: the table has no column {name!r}{meant}")
        if missing:
            continue
        chosen = [found[name] for name in each.columns]
        for leaf, is_number in zip(chosen, (each.type == "regression", True), strict=False):
            why = why_not("label", leaf.type, each.rules)
            if why and not (is_number and is_text(leaf.type)):
                problems.append(f"label {each.name!r}: column {leaf.name!r}: {why}")
        uses.append(LabelUse(each, *chosen))
    return uses, problems


def label_numbers(use: LabelUse, cells: Cells) -> NDArray[np.float64]:
    """Return the label of each cell: a value for regression, otherwise 0 or 1. NaN is missing."""
    if use.options.type == "regression":
        return _valid(use, cells, _numbers(cells))
    return labels_of(cells, use.options.rules)


def label_weights(use: LabelUse, cells: Cells) -> NDArray[np.float64]:
    """Return the weight of each row if it is positive. NaN replaces 0, so the row has no loss."""
    weights = _valid(use, cells, _numbers(cells))
    return np.where(weights > 0, weights, np.nan)


def _valid(use: LabelUse, cells: Cells, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    least = -1 if use.options.loss == "log_mse" else 0 if use.value is not None else -np.inf
    with np.errstate(over="ignore"):
        finite = np.isnan(numbers) | np.isfinite(numbers.astype(np.float32))
    wrong = ~finite | (numbers < least) | ((numbers == -1) & (least == -1))
    if wrong.any():
        raise cells.wrong(
            int(wrong.argmax()),
            f"Label {use.options.name!r} needs {use.options.task.valid_labels}. Correct the value.",
        )
    return numbers


def _numbers(cells: Cells) -> NDArray[np.float64]:
    cells = cells.decoded()
    if not is_text(cells.values.type):
        return numbers_of(cells, ColumnOptions.model_validate("number"))
    found = np.full(len(cells), np.nan)
    for at, text in enumerate(cells.values.to_pylist()):
        try:
            found[at] = np.nan if text is None else float(text)
        except ValueError:
            raise cells.wrong(
                at, "The label must be a number. Correct the value, or leave it empty."
            ) from None
    return found


class TaskSums:
    """Sums the labels of the training rows, for ``Dataset.task_means``."""

    def __init__(self, of: Collection[tasks.Task]) -> None:
        self._tasks = tuple(of)
        self._sums = {task.name: np.zeros(2) for task in of}

    def add(self, rows: pa.RecordBatch, chosen: NDArray[np.bool_]) -> None:
        """Add the labels of the ``chosen`` rows, bool ``[B]``."""
        for task in self._tasks:
            labels = rows[task.name].to_numpy()[chosen].astype(np.float64)
            known = labels[~np.isnan(labels)]
            targets = np.log1p(known) if task.loss == "log_mse" else known
            counted = np.where(known > 0, known, 1) if task.type == "weighted" else known >= -np.inf
            self._sums[task.name] += targets.sum(), counted.sum()

    def means(self) -> dict[str, float]:
        """Return the mean target of each task that has labels."""
        return {name: float(part / whole) for name, (part, whole) in self._sums.items() if whole}
