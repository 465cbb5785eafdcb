"""Tables that are alike, and what sharding plugins offer for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, log
from typing import Any

from pydantic import ValidationError

from recd_plugins.errors import PluginError, RecdError
from recd_plugins.interfaces import Setting, Sharding, Table
from recd_plugins.plugin_call import PLUGIN_FAILURES, plugin_failure
from recd_plugins.values.data_profile import DataProfile

# Tables are alike whose rows, or ids of a row of the batch, are within such a factor.
_ROWS, _IDS = 10.0, 4.0


@dataclass(frozen=True)
class Offer:
    """A sharding plugin with options.

    Attributes:
        use: name of the plugin.
        options: that it is made with.
    """

    use: str
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """What tells offers apart."""
        return f"{self.use} {json.dumps(self.options, sort_keys=True, default=str)}"

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return f"{self.use} {self.written}" if self.options else self.use

    @property
    def written(self) -> str:
        """The options as a registry file has them."""
        options = (f"{name}: {json.dumps(value)}" for name, value in self.options.items())
        return f"{{{', '.join(options)}}}"

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return {"use": self.use, "options": dict(self.options)}


@dataclass(frozen=True)
class Group:
    """Tables that get one choice.

    Attributes:
        tables: in the order of the model.
        offers: of plugins, by name; the planner alone, None, is always one more.
    """

    tables: tuple[Table, ...]
    offers: tuple[Offer, ...]

    @property
    def pooled(self) -> bool:
        """Whether they are looked up in bags."""
        return self.tables[0].pooled


def groups_of(
    tables: Sequence[Table], offering: Sequence[type[Sharding]], setting: Setting
) -> list[Group]:
    """The groups of ``tables``, in the order of their first tables.

    Args:
        tables: to choose for.
        offering: plugins that are asked.
        setting: of the model.

    Raises:
        PluginError: a plugin fails, or offers what are no options.
    """
    alike: dict[tuple[Any, ...], list[Table]] = {}
    profile = setting.data.profile()
    for table in tables:
        alike.setdefault(_key(table, profile), []).append(table)
    return [Group(tuple(some), tuple(_offers(some, offering, setting))) for some in alike.values()]


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


def _offers(
    tables: Sequence[Table], offering: Sequence[type[Sharding]], setting: Setting
) -> list[Offer]:
    found: list[Offer] = []
    for cls in offering:
        try:
            offered = list(cls.offers(tables, setting))
        except RecdError:
            raise
        except PLUGIN_FAILURES as error:
            raise plugin_failure(cls, "offers", error) from error
        for options in offered:
            try:
                cls.Options.model_validate(options)
            except ValidationError as error:
                raise PluginError(
                    f"{cls.name}: offers {options!r}, which are no options of it: {error}"
                ) from error
            found.append(Offer(cls.name, options))
    return found
