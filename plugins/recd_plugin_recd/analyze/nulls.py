"""Nulls in place of lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pyarrow as pa
import pyarrow.types as pt

from recd_plugins.api import DataError, Rows
from recd_plugins.api.columns import place
from recd_plugins.api.tables import is_list_dict, to_lists

Nulls = Literal["error", "empty"]


def without_nulls(rows: Rows, features: Sequence[str], nulls: Nulls) -> Rows:
    """The rows, with empty lists for nulls; a feature that had some is no ``list_dict`` then.

    Raises:
        DataError: a list is null, and nulls are errors.
    """
    data = rows.data
    for name in features:
        column, field = data[name], data.schema.field(name)
        is_list = is_list_dict(field) or pt.is_list(field.type) or pt.is_large_list(field.type)
        if not column.null_count or not is_list:
            continue
        if nulls == "error":
            row = int(column.is_null().to_numpy(zero_copy_only=False).argmax())
            raise DataError(
                f"{place(rows, name, row)}: the list is null; write an empty one, or let "
                "--nulls empty make it one"
            )
        lists = to_lists(column) if is_list_dict(field) else column
        filled = lists.fill_null(pa.scalar([], lists.type))
        data = data.set_column(data.schema.get_field_index(name), name, filled)
    return replace(rows, data=data)
