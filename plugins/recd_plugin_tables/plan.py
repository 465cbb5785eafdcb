"""Column plans, which assign a role to each column and struct field of a table."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import pyarrow as pa

from recd_plugin_tables.kinds import (
    KEYS,
    ColumnOptions,
    Leaf,
    Role,
    feature_name,
    holds_nothing,
    is_list,
    leaves,
    plain,
    why_not,
)
from recd_plugin_tables.labels import LabelOptions, LabelUse, plan_labels
from recd_plugins.api import DataError, text_utils

Others = Literal["error", "unused"]

#: Columns that an import adds: group, time, and position of each row in the table.
SESSION, TIME, REQUEST = "_session", "_time", "_request"
ROW, CANDIDATE = "_row", "_candidate"
OF_IMPORT = frozenset({SESSION, TIME, REQUEST, ROW, CANDIDATE})

#: Path of keys that leads to an option, and the problem with it.
Problem = tuple[tuple[str, ...], str]


class PlanError(DataError):
    """Error for options that do not match a table's columns. ``problems`` lists all mismatches."""

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(f"{where}: {problem}" for _, problem in problems))
        self.problems = [(option, f"{where}: {problem}") for option, problem in problems]

    def __reduce__(self) -> tuple[Any, ...]:
        return DataError, self.args


@dataclass(frozen=True)
class Use:
    """A leaf (column or struct field) with its options, feature name and name in score files."""

    leaf: Leaf
    options: ColumnOptions
    name: str
    key: str


@dataclass(frozen=True)
class ColumnPlan:
    """Leaves (columns and struct fields) of a table, grouped by role.

    ``labels`` are those of option ``label``, and ``label`` is the column of role label. ``explode``
    lists the columns whose elements become rows.
    """

    features: tuple[Use, ...]
    label: Use | None
    labels: tuple[LabelUse, ...]
    session: Use | None
    request: Use | None
    time: Use | None
    keys: tuple[Use, ...]
    explode: tuple[str, ...]

    @property
    def columns(self) -> list[str]:
        """Names of the columns to read from the table."""
        uses = [*self.features, *self.keys, self.label, self.session, self.request, self.time]
        read = {use.leaf.path[0] for use in uses if use is not None}
        read |= {leaf.path[0] for use in self.labels for leaf in use.leaves}
        return sorted(read | set(self.explode))


def plan_columns(
    where: str,
    schema: pa.Schema,
    columns: Mapping[str, ColumnOptions],
    *,
    others: Others = "error",
    explode: Sequence[str] = (),
    implicit: bool = False,
    labelled: bool = True,
    needed: Collection[Role] = (),
    trained: Mapping[str, pa.DataType] = MappingProxyType({}),
    labels: Sequence[LabelOptions] = (),
) -> ColumnPlan:
    """Assign a role to each leaf (column or struct field) of a table.

    Args:
        where: name of the table for errors.
        schema: schema of the table.
        columns: options of each leaf, keyed by leaf name.
        others: what to do with leaves that are missing in ``columns``.
        explode: list columns whose elements become rows.
        implicit: whether every row is a positive, so that no label column exists.
        labelled: whether a label column is required; False for a table to score.
        needed: further roles whose columns a table to score must have.
        trained: types in the training table, used for leaves that have only nulls here.
        labels: labels of multi-task training.
    """
    problems: list[Problem] = [(("explode",), each) for each in explode_problems(schema, explode)]
    found = {
        leaf.name: replace(leaf, type=trained.get(leaf.name, leaf.type))
        if holds_nothing(leaf.type)
        else leaf
        for leaf in leaves(schema, explode)
    }
    groups = {".".join(leaf.path[:n]) for leaf in found.values() for n in range(1, len(leaf.path))}
    uses: list[Use] = []
    misspelt: set[str] = set()  # columns with a similar name in ``columns``
    for name, options in columns.items():
        roles, option = set(options.roles), ("columns", name)
        if leaf := found.get(name):
            feature = options.name or feature_name(name)
            uses.append(Use(leaf, options, feature, key_name(name, options)))
            for role in options.roles:
                why = why_not(role, leaf.type, options) if labelled or role != "label" else None
                if why:
                    problems.append((option, f"column {name!r} has type {leaf.type}: {why}"))
        elif name in groups:
            if roles != {"unused"}:
                fields = ", ".join(repr(each) for each in found if each.startswith(f"{name}."))
                problem = f"column {name!r} is a struct. Use its fields as columns: {fields}."
                problems.append((option, problem))
        elif labelled or options.feature is not None or roles & set(needed):
            close = text_utils.did_you_mean(name, found)
            misspelt |= {each for each in found if close == f". Did you mean {each!r}?"}
            if labelled:
                meant = close or f". Use one of its columns: {', '.join(map(repr, found))}."
                problem = f"the table has no column {name!r}{meant}"
            else:
                problem = (
                    f"the table has no column {name!r}, which the model needs. Add the column, or "
                    f"rename one of: {text_utils.shortened(list(found))}{close or '.'}"
                )
            problems.append((option, problem))
    named = {*columns, *(name for each in labels for name in each.columns)}
    left = [name for name in found if not _is_named(name, named) and name not in misspelt]
    if left and others == "error":
        problems.append(
            (
                ("columns",),
                f"the option 'columns' has no entry for {', '.join(map(repr, left))}. Add an entry "
                f"for each column, such as `{left[0]}: unused`, or set others: unused.",
            )
        )
    label = _the(uses, "label")
    label_uses, wrong = plan_labels(labels if labelled else (), found)
    problems += [(("label",), each) for each in wrong]
    if label is None and not labels and labelled and not implicit:
        problems.append(
            (
                ("columns",),
                "no column has the role 'label'. Set this role for a column, or set implicit: "
                "true if every row is a positive.",
            )
        )
    if label is not None and implicit:
        problems.append(
            (
                ("implicit",),
                f"implicit: true makes every row a positive, but column {label.leaf.name!r} is the "
                "label. Remove the option 'implicit', or set the role of the column to 'unused'.",
            )
        )
    problems += [(("columns",), each) for each in _clashes(uses, [each.name for each in labels])]
    if problems:
        raise PlanError(where, problems)
    return ColumnPlan(
        features=tuple(use for use in uses if use.options.feature),
        label=label if labelled else None,
        labels=tuple(label_uses),
        session=_the(uses, "session"),
        request=_the(uses, "request"),
        time=_the(uses, "time"),
        keys=tuple(use for use in uses if use.key),
        explode=tuple(explode),
    )


def key_name(column: str, options: ColumnOptions) -> str:
    """Return the name of a key column in score files, or "" for other columns."""
    if not set(KEYS) & set(options.roles):
        return ""
    name = feature_name(column)
    return f"{name}_key" if options.feature and (options.name or name) == name else name


def _is_named(leaf: str, columns: Collection[str]) -> bool:
    parts = leaf.split(".")
    return any(".".join(parts[:n]) in columns for n in range(1, len(parts) + 1))


def _the(uses: Sequence[Use], role: Role) -> Use | None:
    return next((use for use in uses if role in use.options.roles), None)


def _clashes(uses: Sequence[Use], labels: Sequence[str]) -> Iterator[str]:
    for role in ("label", "session", "time", "request"):
        twice = [use.leaf.name for use in uses if role in use.options.roles]
        if len(twice) > 1:
            yield (
                f"columns {' and '.join(map(repr, twice))} have the same role {role!r}. Keep the "
                "role for only one of the columns"
                + (
                    f", or set dataset.options.label: [{', '.join(twice)}]."
                    if role == "label"
                    else "."
                )
            )
    seen = dict.fromkeys(OF_IMPORT, "(internal column)") | {
        name: f"label {name}" for name in labels
    }
    for use in uses:
        made = [use.name] if use.options.feature or "label" in use.options.roles else []
        for name in [*made, *([use.key] if use.key else [])]:
            if seen.setdefault(name, use.leaf.name) != use.leaf.name:
                yield (
                    f"columns {seen[name]!r} and {use.leaf.name!r} would both be imported as "
                    f"{name!r}. Set the option 'name' of one of these columns to another name."
                )


def explode_problems(schema: pa.Schema, explode: Sequence[str]) -> Iterator[str]:
    """Yield an error text for each column that cannot be exploded."""
    for name in explode:
        if name not in schema.names:
            meant = text_utils.did_you_mean(name, schema.names)
            yield f"option 'explode' contains {name!r}, but the table has no such column{meant}"
        elif not is_list(plain(schema.field(name).type)):
            yield (
                f"column {name!r} in option 'explode' is {schema.field(name).type}, not a list. "
                "Remove the column from this option."
            )
