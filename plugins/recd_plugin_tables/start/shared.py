"""Lists of the ids that another column has one of, as the items that a user chose before."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyarrow as pa

from recd_plugin_tables.kinds import is_text
from recd_plugin_tables.start.guesses import Guess, Guesses
from recd_plugin_tables.start.names import NUMBER_WORDS, words_of
from recd_plugin_tables.start.survey import Survey

# Lists of which more than this share are ids of another column are numbered as it is.
_ALIKE = 0.5


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
            if best is not None and shares[best] > _ALIKE:
                numbered_alike.setdefault(best, [best]).append(each.name)
    return [
        Shared(tuple(names), len(pa.chunked_array([texts[name] for name in names]).unique()))
        for names in numbered_alike.values()
    ]


def ids_of_lists(survey: Survey, columns: list[Guess]) -> list[Guess]:
    """The columns, where whole numbers are ids if a list has the same ones, as of an item."""
    lists = [each.name for each in columns if "ids" in each.roles and each.seen.whole]

    def is_listed(each: Guess) -> bool:
        named = NUMBER_WORDS.search(words_of(each.seen.leaf.path[-1]))
        return (
            each.roles == ("number",)
            and each.seen.has_gaps
            and not named
            and any(survey.share(name, each.name) > _ALIKE for name in lists)
        )

    return [
        Guess(each.seen, ("id",), f"{each.seen.distinct:,} whole numbers that a list has, too")
        if is_listed(each)
        else each
        for each in columns
    ]


def hashed_alike(survey: Survey, columns: list[Guess]) -> list[Guess]:
    """The columns, where whole numbers in a text are text if they are ids of a column of text."""
    texts = [each.name for each in columns if "id" in each.roles and each.seen.is_text]

    def is_text(each: Guess) -> bool:
        return "integers" in each.options and any(
            survey.share(each.name, text) > _ALIKE for text in texts
        )

    return [
        replace(each, options={k: v for k, v in each.options.items() if k != "integers"})
        if is_text(each)
        else each
        for each in columns
    ]
