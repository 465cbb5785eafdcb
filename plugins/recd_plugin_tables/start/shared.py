"""Lists of the ids that another column has one of, as the items that a user chose before."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from recd_plugin_tables.kinds import is_text
from recd_plugin_tables.start.guess import ALIKE, Guesses


@dataclass(frozen=True)
class Shared:
    """Columns that are numbered alike.

    Attributes:
        names: the id first, then lists of such ids.
        distinct: ids that the sample has of all of them.
    """

    names: tuple[str, ...]
    distinct: int


def shared(guesses: Guesses) -> list[Shared]:
    """Columns whose ids are the same, by the sample; numbers without gaps are so by chance."""
    survey = guesses.survey
    features = [each for each in guesses.features("id", "ids") if "by" not in each.options]
    found = {each.name: survey.elements(each.name) for each in features}
    texts = {
        name: each.cast(pa.string())
        for name, each in found.items()
        if is_text(each.type) or survey[name].has_gaps
    }
    ids = [each.name for each in features if "id" in each.roles and each.name in texts]
    numbered_alike: dict[str, list[str]] = {}
    for each in features:
        if "ids" in each.roles and each.name in texts and "integers" not in each.options:
            shares = {
                name: survey.share(each.name, name)
                for name in ids
                if is_text(found[name].type) == is_text(found[each.name].type)
            }
            best = max(shares, key=lambda name: shares[name], default=None)
            if best is not None and shares[best] > ALIKE:
                numbered_alike.setdefault(best, [best]).append(each.name)
    return [
        Shared(tuple(names), len(pa.chunked_array([texts[name] for name in names]).unique()))
        for names in numbered_alike.values()
    ]
