"""What the columns of a table are taken for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recd_plugin_tables.columns import Role
from recd_plugin_tables.start.names import ITEM, named_so
from recd_plugin_tables.start.survey import Seen, Survey


@dataclass(frozen=True)
class Guess:
    """What a column is taken for.

    Attributes:
        seen: what the sample shows of it.
        roles: what it is used for.
        why: the reason, in words.
        options: further options of the column.
        history: whether it is a sequence that gets a pooling of its own.
        long_tail: whether it is a number that a logarithm suits.
        suspicious: why it may be known only after the label; empty if nothing says so.
    """

    seen: Seen
    roles: tuple[Role, ...]
    why: str
    options: Mapping[str, Any] = field(default_factory=dict)
    history: bool = False
    long_tail: bool = False
    suspicious: str = ""

    @property
    def name(self) -> str:
        """Of the leaf, as options name it."""
        return self.seen.leaf.name

    @property
    def unused(self) -> bool:
        return self.roles == ("unused",)

    @property
    def is_plain_id(self) -> bool:
        """Whether it is an id, neither whose rows belong together nor of a time."""
        return self.roles in (("id",), ("key", "id")) and not self.options.get("by")


@dataclass(frozen=True)
class Guesses:
    """What the columns of a table are taken for.

    Attributes:
        survey: the sample.
        columns: in the order of the table.
        implicit: whether every row is a positive.
    """

    survey: Survey
    columns: tuple[Guess, ...]
    implicit: bool

    def the(self, role: Role) -> Guess | None:
        """The column of a role that one has at most."""
        return next((guess for guess in self.columns if role in guess.roles), None)

    @property
    def item(self) -> Guess | None:
        """The id that a user chose: by its name, or the one with most values."""
        ids = [each for each in self.columns if each.is_plain_id]
        named = named_so([each.seen for each in ids], ITEM, "id")
        most = max(ids, key=lambda each: each.seen.distinct, default=None)
        return next((each for each in ids if each.name == named), most)

    def features(self, *roles: Role) -> list[Guess]:
        """The columns of any of these roles, in order."""
        return [guess for guess in self.columns if set(roles) & set(guess.roles)]
