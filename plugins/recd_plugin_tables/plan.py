"""A plan of the columns: which leaf of the table is what, every one of them named."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import pyarrow as pa

from recd_plugin_tables.columns import KEYS, ColumnOptions, Role, feature_name
from recd_plugin_tables.kinds import Leaf, is_list, leaves, plain, why_not
from recd_plugins.api import DataError

Others = Literal["error", "unused"]

#: Columns of an import besides the user's: whose rows belong together, when they were, where in the
#: table they stand, and which candidate of it they are.
SESSION, TIME, REQUEST = "_session", "_time", "_request"
ROW, CANDIDATE = "_row", "_candidate"
OF_IMPORT = frozenset({SESSION, TIME, REQUEST, ROW, CANDIDATE})


#: An option, by the keys that lead to it, and what is wrong with it.
Problem = tuple[tuple[str, ...], str]


class PlanError(DataError):
    """Options that a table's columns do not suit.

    Attributes:
        problems: all of them.
    """

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(f"{where}: {problem}" for _, problem in problems))
        self.problems = [(option, f"{where}: {problem}") for option, problem in problems]

    def __reduce__(self) -> tuple[Any, ...]:
        return DataError, self.args


@dataclass(frozen=True)
class Use:
    """A leaf, its options, its feature name, and its name in predictions if it is a key."""

    leaf: Leaf
    options: ColumnOptions
    name: str
    key: str


@dataclass(frozen=True)
class ColumnPlan:
    """Which leaves of a table are what.

    Attributes:
        features: what a model is fed, in the order that the user gives.
        label: None where every row is a positive.
        session, request, time: None where no leaf says it.
        keys: what predictions carry.
        unused: leaves that nothing reads.
        explode: columns of which every element is a row.
    """

    features: tuple[Use, ...]
    label: Use | None
    session: Use | None
    request: Use | None
    time: Use | None
    keys: tuple[Use, ...]
    unused: tuple[Leaf, ...]
    explode: tuple[str, ...]

    @property
    def columns(self) -> list[str]:
        """The columns of the table that are read."""
        uses = [*self.features, *self.keys, self.label, self.session, self.request, self.time]
        read = {use.leaf.path[0] for use in uses if use is not None}
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
    folder_keys: Collection[str] = (),
) -> ColumnPlan:
    """Which leaf is what.

    Args:
        where: the table, for errors.
        schema: of the table, as it is written.
        columns: what the user says of them.
        others: what becomes of leaves that ``columns`` does not name.
        explode: columns of lists, of which every element is a row.
        implicit: every row is a positive; there is no label.
        labelled: False where all but the features may be missing, and no label is looked at, as
            in a table to score.
        needed: roles whose columns have to be there even so.
        folder_keys: columns that names of folders say in the table that is trained on.
    """
    problems: list[Problem] = [(("explode",), each) for each in explode_problems(schema, explode)]

    def wrong(problem: str, *option: str) -> None:
        problems.append((option, problem))

    found = leaves(schema, explode)
    by_name: dict[str, Leaf] = {}
    for leaf in found:
        if leaf.name in by_name:
            wrong(f"two columns are called {leaf.name}, once structs are taken apart")
        by_name[leaf.name] = leaf
    groups = {".".join(leaf.path[:n]) for leaf in found for n in range(1, len(leaf.path))}
    uses: list[Use] = []
    for name, options in columns.items():
        roles = set(options.roles)
        if name in by_name:
            leaf = by_name[name]
            uses.append(
                Use(leaf, options, options.name or feature_name(name), key_name(name, options))
            )
            for role in options.roles:
                why = why_not(role, leaf.type, options) if labelled or role != "label" else None
                if why:
                    wrong(f"column {name} is {leaf.type}: {why}", "columns", name)
        elif name in groups:
            if roles != {"unused"}:
                fields = ", ".join(each for each in by_name if each.startswith(f"{name}."))
                wrong(f"column {name} is a struct: name its fields: {fields}", "columns", name)
        elif labelled or options.feature is not None or roles & set(needed):
            near = get_close_matches(name, by_name, n=1)
            meant = f"did you mean {near[0]}" if near else f"there are: {', '.join(by_name)}"
            if name in folder_keys:
                meant += (
                    f"; in training the names of folders said it ({name}=.../): put this table "
                    f"into such a folder, or train with `{name}: unused`"
                )
            wrong(f"no column {name}; {meant}", "columns", name)
    named = {use.leaf.name for use in uses} | {
        name
        for name in by_name
        if any(name[:end] in columns for end, letter in enumerate(name) if letter == ".")
    }
    left = [name for name in by_name if name not in named]
    if left and others == "error":
        wrong(
            f"no word on what to do with {', '.join(left)}: name each under columns, as "
            f"`{left[0]}: unused`, or set others: unused",
            "columns",
        )
    label = _the(uses, "label")
    if label is None and labelled and not implicit:
        wrong(
            "no column is the label; mark one `label`, or set implicit: true where every row is a "
            "positive",
            "columns",
        )
    if label is not None and implicit:
        wrong(
            f"implicit: true takes every row for a positive, and {label.leaf.name} is the label; "
            "choose one",
            "implicit",
        )
    problems += [(("columns",), each) for each in _clashes(uses)]
    if problems:
        raise PlanError(where, problems)
    used = {use.leaf.name for use in uses if "unused" not in use.options.roles}
    return ColumnPlan(
        features=tuple(use for use in uses if use.options.feature),
        label=label if labelled else None,
        session=_the(uses, "session"),
        request=_the(uses, "request"),
        time=_the(uses, "time"),
        keys=tuple(use for use in uses if use.key),
        unused=tuple(leaf for leaf in found if leaf.name not in used),
        explode=tuple(explode),
    )


def key_name(column: str, options: ColumnOptions) -> str:
    """The name under which predictions carry a column; nothing where they do not.

    That of the column, with ``_key`` behind it where a feature has it already.
    """
    if not set(KEYS) & set(options.roles):
        return ""
    name = feature_name(column)
    return f"{name}_key" if options.feature and (options.name or name) == name else name


def _the(uses: Sequence[Use], role: Role) -> Use | None:
    return next((use for use in uses if role in use.options.roles), None)


def _clashes(uses: Sequence[Use]) -> Iterator[str]:
    for role in ("label", "session", "time", "request"):
        twice = [use.leaf.name for use in uses if role in use.options.roles]
        if len(twice) > 1:
            yield f"{' and '.join(twice)} are both the {role}; keep one"
    seen: dict[str, str] = {}
    for use in uses:
        made = [use.name] if use.options.feature or "label" in use.options.roles else []
        for name in [*made, *([use.key] if use.key else [])]:
            if name in OF_IMPORT:
                yield f"column {use.leaf.name} would be called {name}, as one of an import's own"
            if name in seen and seen[name] != use.leaf.name:
                yield (
                    f"columns {seen[name]} and {use.leaf.name} would both be called {name}; set "
                    "name: of one"
                )
            seen[name] = use.leaf.name


def explode_problems(schema: pa.Schema, explode: Sequence[str]) -> Iterator[str]:
    """What is wrong with columns whose elements shall be rows, in words."""
    for name in explode:
        if name not in schema.names:
            near = get_close_matches(name, schema.names, n=1)
            meant = near[0] if near else ", ".join(schema.names)
            yield f"no column {name}, which explode names; there is: {meant}"
        elif not is_list(plain(schema.field(name).type)):
            yield f"column {name} is {schema.field(name).type}, no list that could be exploded"
