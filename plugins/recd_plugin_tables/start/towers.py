"""What of a log of positives is of the user, and what of the item: sides of a two-tower model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, count
from typing import Literal

from recd_plugin_tables.columns import feature_name
from recd_plugin_tables.start.guesses import Guess, Guesses

# Share of the rows behind the first of a session that have a later time, where times tell an order.
_LATER = 0.1


@dataclass(frozen=True)
class BuiltHistory:
    """A history that the import builds, since the table has none.

    Attributes:
        name: of the feature.
        of: column of the item.
        ties: as the option of ``tables.table``.
    """

    name: str
    of: str
    ties: Literal["apart", "stored"]


@dataclass(frozen=True)
class Towers:
    """Features by side; what is of neither would tell a tower what the other is to find.

    Attributes:
        item, user: sparse features, first the id of each.
        item_dense, user_dense: places among the dense features, from 0.
        item_numbers: names of the item's dense features.
        histories: of ``user``, those that are lists.
        built: the one of them that the import builds; None where the table has what tells users.
        user_id: feature of the user; None where no column is one.
    """

    item: tuple[str, ...]
    user: tuple[str, ...]
    item_dense: tuple[int, ...]
    user_dense: tuple[int, ...]
    item_numbers: tuple[str, ...]
    histories: tuple[str, ...]
    built: BuiltHistory | None
    user_id: str | None

    @property
    def rank_options(self) -> str:
        """Of `recd rank`, for this model."""
        user = f" --user {self.user_id}" if self.user_id else ""
        return user + "".join(f" --seen {n}" for n in self.histories)


def towers(guesses: Guesses) -> Towers | None:
    """The sides of a log; None where it has no item, or nothing is of a user."""
    item, session = guesses.item, guesses.the("session")
    if not guesses.implicit or item is None:
        return None
    ids = guesses.features("id", "ids")
    user_id = session if session in ids else None

    key_of_user = user_id or session

    def of(each: Guess, key: Guess | None) -> bool:
        return key is not None and guesses.survey.determines(key.name, each.name)

    items = [each for each in ids if each is not item and each is not user_id and of(each, item)]
    of_item = [item, *items]
    of_user = [
        each
        for each in ids
        if each not in of_item and (each.history or "time" in each.roles or of(each, key_of_user))
    ]
    built = None
    if user_id is None and not any(each.history for each in of_user):
        built = _built_history(guesses, item)
    if user_id is not None:
        of_user = [user_id, *(each for each in of_user if each is not user_id)]
    if not of_user and built is None:
        return None
    histories = [feature_name(each.name) for each in of_user if each.history]
    histories += [built.name] if built else []
    places: dict[str, list[int]] = {"item": [], "user": []}
    numbers, place = [], 0
    for each in guesses.features("number", "numbers"):
        width = each.seen.width or 1 if "numbers" in each.roles else 1
        if width == 1 and of(each, item):
            numbers.append(feature_name(each.name))
            places["item"].append(place)
        elif of(each, key_of_user):
            places["user"] += range(place, place + width)
        place += width
    return Towers(
        _names(of_item),
        (*([built.name] if built else []), *_names(of_user)),
        tuple(places["item"]),
        tuple(places["user"]),
        tuple(numbers),
        tuple(histories),
        built,
        None if user_id is None else feature_name(user_id.name),
    )


def _built_history(guesses: Guesses, item: Guess) -> BuiltHistory | None:
    """The items of earlier rows of the session; None where each row is a session of its own."""
    survey = guesses.survey
    group, time = guesses.the("session") or guesses.the("request"), guesses.the("time")
    if group is None or group.seen.unique:
        return None
    ties: Literal["apart", "stored"] = "apart"
    if time is not None:
        # Where nearly all rows of a session have one time, as a day, only their order tells.
        later = (survey.pairs(group.name, time.name) or survey.rows) - group.seen.distinct
        ties = "stored" if later < _LATER * (survey.rows - group.seen.distinct) else "apart"
    taken = {feature_name(each.name) for each in guesses.columns}
    names = chain(["history"], (f"history_{number}" for number in count(2)))
    name = next(each for each in names if each not in taken)
    return BuiltHistory(name, item.name, ties)


def _names(columns: list[Guess]) -> tuple[str, ...]:
    return tuple(feature_name(each.name) for each in columns)
