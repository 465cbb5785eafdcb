"""IKJTs straight from storage: layout ``list_dict`` has each list once and a code for each row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from recd_plugin_recd.ikjt import IkjtConverter
from recd_plugins.api import Rows

if TYPE_CHECKING:
    from recd_plugins.api.batches import InverseKeyedJaggedTensor


class ListDictConverter(IkjtConverter):
    """InverseKeyedJaggedTensor straight from layout list_dict, without a look at ids.

    Features that the table holds as lists are deduplicated by their ids. Where a batch spans row
    groups, equal lists of two of them stay two unique rows.
    """

    name = "recd.list_dict"

    def _deduplicated(
        self, rows: Rows, groups: Sequence[Sequence[str]]
    ) -> tuple[InverseKeyedJaggedTensor, ...]:
        from recd_plugins.api.batches import ikjts_from_dictionaries
        from recd_plugins.api.columns import BrokenListError, broken_list, dictionary_column

        stored, by_ids = {}, []
        for number, group in enumerate(groups):
            columns = {
                name: column
                for name in group
                if (column := dictionary_column(rows, name)) is not None
            }
            if len(columns) == len(group):
                stored[number] = columns
            else:
                by_ids.append(number)
        try:
            passed_on = ikjts_from_dictionaries(list(stored.values()), len(rows))
        except BrokenListError as error:
            names = list(chain.from_iterable(stored.values()))
            raise broken_list(rows, names[error.column]) from error
        compared = super()._deduplicated(rows, [groups[number] for number in by_ids])
        ikjts = dict(zip([*stored, *by_ids], [*passed_on, *compared], strict=True))
        return tuple(ikjts[number] for number in range(len(groups)))
