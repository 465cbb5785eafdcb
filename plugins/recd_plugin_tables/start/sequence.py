"""Detects logs of positives that are sequences of items, such as sessions of clicks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, count
from typing import Literal

from recd_plugin_tables.columns import feature_name
from recd_plugin_tables.start.guesses import Guesses

# Share of the rows behind the first of a session that have a later time, where times tell an order.
_LATER = 0.1


@dataclass(frozen=True)
class ItemSequence:
    """The items of a session one after the other.

    Attributes:
        history: name of the feature that the import builds.
        item: column of the item.
        ties: as the option of ``tables.table``.
    """

    history: str
    item: str
    ties: Literal["apart", "stored"]

    @property
    def rank_options(self) -> str:
        """Options of `recd rank` for this model."""
        return f" --seen {self.history}"


def sequence(guesses: Guesses) -> ItemSequence | None:
    """Return what a sequence model of the log needs.

    None if a column tells users apart (a user id or a history), or if each row is a session of its
    own. A request is no user: those of the test are not in training.
    """
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
        # Where nearly all rows of a session have one time, as a day, only their order tells.
        times = survey.pairs(group.name, time.name) or survey.rows
        rows = survey.rows - group.seen.distinct
        ties = "stored" if times - group.seen.distinct < _LATER * rows else "apart"
    taken = {feature_name(each.name) for each in guesses.columns}
    names = chain(["history"], (f"history_{number}" for number in count(2)))
    return ItemSequence(next(each for each in names if each not in taken), item.name, ties)
