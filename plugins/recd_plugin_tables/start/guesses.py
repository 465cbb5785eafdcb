"""Guessed roles of a table's columns, and the models that suit them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from recd_plugin_tables.kinds import Role, feature_name, is_text
from recd_plugin_tables.start.names import ITEM, named_so
from recd_plugin_tables.start.survey import Seen, Survey
from recd_plugins.api import data_profiles


@dataclass(frozen=True)
class Guess:
    """Guessed role of a column, and the reason. ``long_tail`` marks numbers for a log transform."""

    seen: Seen
    roles: tuple[Role, ...]
    why: str
    options: Mapping[str, Any] = field(default_factory=dict)
    history: bool = False
    long_tail: bool = False
    suspicious: str = ""

    @property
    def name(self) -> str:
        """Name of the column or struct field."""
        return self.seen.leaf.name

    @property
    def unused(self) -> bool:
        return self.roles == ("unused",)

    @property
    def is_plain_id(self) -> bool:
        """Whether the column is an id that is neither a session nor part of a time."""
        return self.roles == ("id",) and not self.options.get("by")


@dataclass(frozen=True)
class Guesses:
    """The guessed roles of all columns, in table order, and the entries of several ``labels``."""

    survey: Survey
    columns: tuple[Guess, ...]
    implicit: bool
    labels: tuple[Mapping[str, Any], ...] = ()

    def the(self, role: Role) -> Guess | None:
        """Return the column with a role, or None. At most one column may have this role."""
        return next((guess for guess in self.columns if role in guess.roles), None)

    @property
    def item(self) -> Guess | None:
        """The item id, found by its name; otherwise the id column with the most distinct values."""
        ids = [each for each in self.columns if each.is_plain_id]
        named = named_so([each.seen for each in ids], ITEM, "id")
        most = max(ids, key=lambda each: each.seen.distinct, default=None)
        return next((each for each in ids if each.name == named), most)

    def features(self, *roles: Role) -> list[Guess]:
        """Return the columns that have any of these roles."""
        return [guess for guess in self.columns if set(roles) & set(guess.roles)]


# Number of rows to inspect.
_ROWS = 20_000


def repeats_pay(guesses: Guesses, batch_size: int, copies: int) -> bool:
    """Return whether deduplication would speed up training on this table.

    ``copies`` is the number of training rows made from each row.
    """
    survey = guesses.survey
    candidates = max((each.rows for each in survey.seen if each.leaf.exploded), default=0)
    copies *= max(1, candidates // survey.rows)
    group = guesses.the("session") or guesses.the("request")
    order = None
    if group is not None and not group.seen.leaf.exploded:
        order = np.argsort(_codes(survey.values(group.name)), kind="stable")
    for each in guesses.features("ids"):
        needed = data_profiles.least_ids_saved(sequence=each.history)
        if each.seen.length < needed or each.seen.leaf.exploded:
            continue
        values = survey.values(each.name)
        values = values.take(pa.array(order[:_ROWS])) if order is not None else values[:_ROWS]
        stored = _share_stored(values, max(1, batch_size // copies)) / copies
        if each.seen.length * (1 - stored) >= needed:
            return True
    return False


def _share_stored(values: pa.Array, batch_size: int) -> float:
    rows = [tuple(each) if isinstance(each, list) else each for each in values.to_pylist()]
    starts = range(0, len(rows), batch_size)
    return sum(len(set(rows[start : start + batch_size])) for start in starts) / len(rows)


def _codes(values: pa.Array) -> np.ndarray:
    codes = values.dictionary_encode(null_encoding="encode").indices
    return np.asarray(codes.to_numpy(zero_copy_only=False))


# Lists that share more than this fraction of ids with another column use its vocabulary.
_ALIKE = 0.5


@dataclass(frozen=True)
class Shared:
    """Names of an id column and of lists with the same ids, and their number of distinct ids."""

    names: tuple[str, ...]
    distinct: int


def shares_ids(survey: Survey, lists: str, ids: str) -> bool:
    """Return whether most elements of a list column are ids of another column, not by chance."""
    of_lists, of_ids = _elements(survey, lists), _elements(survey, ids)
    same_type = is_text(of_lists.type) == is_text(of_ids.type)
    if not (same_type and _is_distinctive(of_lists) and _is_distinctive(of_ids)):
        return False
    return survey.share(lists, ids) > _ALIKE


def _elements(survey: Survey, name: str) -> pa.Array:
    found = survey.elements(name)
    return found.cast(pa.int64()) if survey[name].integers else found


def _is_distinctive(ids: pa.Array) -> bool:
    """Return whether two unrelated columns would not have the same ids by chance."""
    if is_text(ids.type):
        return True
    numbers = ids.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if not len(numbers) or not (numbers == np.round(numbers)).all():
        return False
    span = float(np.ptp(numbers))
    return span > 2 * len(np.unique(numbers)) or float(numbers.min()) > span


def shared(guesses: Guesses) -> list[Shared]:
    """Return groups of columns that have the same ids in the sample, to share a vocabulary."""
    survey = guesses.survey
    features = [each for each in guesses.features("id", "ids") if "by" not in each.options]
    found = {each.name: _elements(survey, each.name) for each in features}
    ids = [each.name for each in features if "id" in each.roles]
    alike: dict[str, list[str]] = {}
    for each in features:
        if "ids" in each.roles:
            shares = {
                name: survey.share(each.name, name)
                for name in ids
                if shares_ids(survey, each.name, name)
            }
            best = max(shares, key=lambda name: shares[name], default=None)
            if best is not None:
                alike.setdefault(best, [best]).append(each.name)
    return [
        Shared(
            tuple(names),
            len(pa.chunked_array([found[name].cast(pa.string()) for name in names]).unique()),
        )
        for names in alike.values()
    ]


# Minimum share of later-than-previous rows in sessions for times to define an order.
_LATER = 0.1


@dataclass(frozen=True)
class ItemSequence:
    """A session log for SASRec: name of the history feature, item column, and option ``ties``."""

    history: str
    item: str
    ties: Literal["apart", "stored"]

    @property
    def rank_options(self) -> str:
        """Command line options of `recd rank` for this model."""
        return f" --seen {self.history}"


def sequence(guesses: Guesses) -> ItemSequence | None:
    """Return the item sequence of a session log without user ids or histories, otherwise None."""
    survey, item = guesses.survey, guesses.item
    group = guesses.the("session") or guesses.the("request")
    if not guesses.implicit or item is None or group is None or group.seen.unique:
        return None
    ids = guesses.features("id", "ids")
    is_user = group in ids and "request" not in group.roles
    if is_user or any(each.history for each in ids):
        return None
    ties: Literal["apart", "stored"] = "apart"
    if (time := guesses.the("time")) is not None:
        # If nearly all rows of a session have the same time, such as a day, only row order helps.
        times = survey.pairs(group.name, time.name) or survey.rows
        rows = survey.rows - group.seen.distinct
        ties = "stored" if times - group.seen.distinct < _LATER * rows else "apart"
    return ItemSequence(name_of_history(guesses), item.name, ties)


def name_of_history(guesses: Guesses) -> str:
    """Return a name for a history feature that no feature of the table has."""
    taken = {feature_name(each.name) for each in guesses.columns}
    names = chain(["history"], (f"history_{number}" for number in count(2)))
    return next(name for name in names if name not in taken)


@dataclass(frozen=True)
class Towers:
    """Features of a two-tower model. Features that would leak the item are in neither tower.

    Attributes:
        item, user: sparse features of each tower, the item or user id first.
        item_dense, user_dense: indices of the dense features of each tower.
        item_numbers: names of the item's dense features.
        histories: history lists among ``user``.
        user_id: the user id feature, or None.
    """

    item: tuple[str, ...]
    user: tuple[str, ...]
    item_dense: tuple[int, ...]
    user_dense: tuple[int, ...]
    item_numbers: tuple[str, ...]
    histories: tuple[str, ...]
    user_id: str | None

    @property
    def rank_options(self) -> str:
        """Command line options of `recd rank` for this model."""
        user = f" --user {self.user_id}" if self.user_id else ""
        return user + "".join(f" --seen {n}" for n in self.histories)


def towers(guesses: Guesses) -> Towers | None:
    """Return both towers; None with a label, without item, or with neither user id nor history."""
    item, session = guesses.item, guesses.the("session")
    if not guesses.implicit or item is None:
        return None
    ids = guesses.features("id", "ids")
    user_id = session if session in ids else None

    def of(each: Guess, key: Guess | None) -> bool:
        return key is not None and guesses.survey.determines(key.name, each.name)

    items = [each for each in ids if each is not item and each is not user_id and of(each, item)]
    of_item = [item, *items]
    of_user = [
        each
        for each in ids
        if each not in of_item and (each.history or "time" in each.roles or of(each, user_id))
    ]
    if user_id is not None:
        of_user = [user_id, *(each for each in of_user if each is not user_id)]
    if user_id is None and not any(each.history for each in of_user):
        return None
    places: dict[str, list[int]] = {"item": [], "user": []}
    numbers, place = [], 0
    for each in guesses.features("number", "numbers"):
        width = each.seen.width or 1 if "numbers" in each.roles else 1
        if width == 1 and of(each, item):
            numbers.append(feature_name(each.name))
            places["item"].append(place)
        elif of(each, user_id):
            places["user"] += range(place, place + width)
        place += width
    return Towers(
        _names(of_item),
        _names(of_user),
        tuple(places["item"]),
        tuple(places["user"]),
        tuple(numbers),
        _names([each for each in of_user if each.history]),
        None if user_id is None else feature_name(user_id.name),
    )


def _names(columns: list[Guess]) -> tuple[str, ...]:
    return tuple(feature_name(each.name) for each in columns)
