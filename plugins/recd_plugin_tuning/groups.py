"""Tables that are alike, and what sharding plugins offer for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, log
from typing import Any

from recd_plugins.api import Candidate, DataProfile, Offered, SearchContext, Table

# Tables are alike whose rows, or ids of a row of the batch, are within such a factor.
_ROWS, _IDS = 10.0, 4.0


@dataclass(frozen=True)
class Group:
    """Tables that get one choice.

    Attributes:
        tables: in the order of the model.
        offers: of plugins, by name; the planner alone, None, is always one more.
    """

    tables: tuple[Table, ...]
    offers: tuple[Candidate, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tables."""
        return tuple(table.name for table in self.tables)

    @property
    def pooled(self) -> bool:
        """Whether they are looked up in bags."""
        return self.tables[0].pooled


def groups_of(question: SearchContext) -> list[Group]:
    """The groups of the tables to choose for, in the order of their first tables.

    Raises:
        PluginError: a plugin fails, or offers what are no options.
    """
    alike: dict[tuple[Any, ...], list[Table]] = {}
    profile = question.setting.data.profile()
    for table in question.tables:
        alike.setdefault(_key(table, profile), []).append(table)
    return [Group(tuple(some), tuple(question.offers(some))) for some in alike.values()]


def offered(chosen: Iterable[tuple[Sequence[str], Candidate | None]]) -> Offered:
    """Each offer once, with all of its tables: of names of tables, and the offer that they get."""
    names: dict[str, tuple[Candidate, list[str]]] = {}
    for tables, offer in chosen:
        if offer is not None:
            names.setdefault(offer.key, (offer, []))[1].extend(tables)
    return list(names.values())


def _key(table: Table, profile: DataProfile) -> tuple[Any, ...]:
    features = [profile.of(name) for name in table.features]
    ids = sum(feature.length for feature in features)
    return (
        table.pooled,
        table.embedding_dim,
        any(feature.deduplicated for feature in features),
        floor(log(table.num_embeddings, _ROWS)),
        floor(log(ids, _IDS)) if ids else None,
    )
