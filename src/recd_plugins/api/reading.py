"""Resumable reading of rows: plans of what is read where, readers of them, batches in any order.

For datasets and their wrappers, and for converters. Needs pyarrow and neither torch nor numba.
"""

from recd_plugins.data.plain import PlainConverter
from recd_plugins.data.read_plan import History, Piece, ReadPlan, Unit
from recd_plugins.data.reader import PlannedReader, ReadPieces, digest, prefetch
from recd_plugins.data.rows import RowTable, concat_rows, rebatch, rows_of_split, slice_rows

__all__ = [
    "History",
    "Piece",
    "PlainConverter",
    "PlannedReader",
    "ReadPieces",
    "ReadPlan",
    "RowTable",
    "Unit",
    "concat_rows",
    "digest",
    "prefetch",
    "rebatch",
    "rows_of_split",
    "slice_rows",
]
