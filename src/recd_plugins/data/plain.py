"""Converter without deduplication."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recd_plugins.interfaces import Converter, FeatureSchema, Rows

if TYPE_CHECKING:
    from recd_plugins.interfaces.batch import Batch


class PlainConverter(Converter):
    """Converts rows to plain KeyedJaggedTensors, without deduplication."""

    name = "plain"

    def convert(self, rows: Rows, schema: FeatureSchema) -> Batch:
        from recd_plugins.data.arrow import dense_features, labels, sparse_column
        from recd_plugins.interfaces.batch import Batch
        from recd_plugins.sparse.from_columns import kjt_from_columns

        columns = {name: sparse_column(rows, name) for name in schema.sparse}
        return Batch(
            dense_features=dense_features(rows, schema.dense),
            labels=labels(rows, schema),
            kjt=kjt_from_columns(columns, len(rows)) if columns else None,
        )
