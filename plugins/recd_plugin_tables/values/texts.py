"""Texts of ids, kept while a table is imported."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recd_plugin_tables.columns import ColumnOptions
from recd_plugin_tables.leaves import is_list, list_parts
from recd_plugin_tables.values.cells import Cells
from recd_plugin_tables.values.hashing import text_ids
from recd_plugin_tables.values.ids import split_text
from recd_plugins.api import DataError

_SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])


class Texts:
    """Files of the id and the text of each id of some features, one a feature.

    Args:
        folder: where they are written, as ``FEATURE.parquet``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, dict[int, str]] = {}

    def add(self, feature: str, cells: Cells, options: ColumnOptions) -> None:
        """The texts of some rows.

        Raises:
            DataError: two texts have one id.
        """
        values = cells.values
        if options.separator is not None:
            values = split_text(values, options.separator)
        if is_list(values.type):
            values = list_parts(values)[1]
        texts = values.unique().drop_null().cast(pa.string())
        ids = text_ids(texts).to_pylist()
        known = self._known.setdefault(feature, {})
        for number, text in zip(ids, texts.to_pylist(), strict=True):
            if known.setdefault(number, text) != text:
                raise DataError(
                    f"column of feature {feature}: {text!r} and {known[number]!r} have one id, "
                    f"{number}; write other names"
                )

    def close(self) -> None:
        """Write them."""
        for feature, known in self._known.items():
            self._folder.mkdir(parents=True, exist_ok=True)
            ids = pa.array(known.keys(), pa.int64())
            table = pa.table([ids, pa.array(known.values())], schema=_SCHEMA)
            pq.write_table(table, self._folder / f"{feature}.parquet", write_page_checksum=True)
