"""What of a log of positives is of the user, and what of the item: sides of a two-tower model."""

from __future__ import annotations

from dataclasses import dataclass

from recd_plugin_tables.columns import feature_name
from recd_plugin_tables.start.guesses import Guess, Guesses


@dataclass(frozen=True)
class Towers:
    """Features by side; what is of neither would tell a tower what the other is to find.

    Attributes:
        item, user: sparse features, first the id of each.
        item_dense, user_dense: places among the dense features, from 0.
        item_numbers: names of the item's dense features.
        histories: of ``user``, those that are lists.
        user_id: feature of the user; None where no column is one.
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
        """Of `recd rank`, for this model."""
        user = f" --user {self.user_id}" if self.user_id else ""
        return user + "".join(f" --seen {n}" for n in self.histories)


def towers(guesses: Guesses) -> Towers | None:
    """Return the sides of a log; None if it has no item, or neither a user id nor a history."""
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
