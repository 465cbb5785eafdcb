"""Columns of lists: duplicates among their rows, statistics, and writing, by numba kernels.

For converters, commands that study or write tables, and benchmarks. Needs numba and no torch.
"""

from recd_plugins.data.arrow import (
    broken_list,
    dense_features,
    dictionary_column,
    labels,
    place,
    sparse_column,
)
from recd_plugins.data.statistics import StatisticsAccumulator, session_column
from recd_plugins.data.table_writer import Nulls, TableWriter, choose_layouts
from recd_plugins.sparse.dedup import Deduplicator, JaggedColumn
from recd_plugins.sparse.dictionaries import BrokenListError, DictionaryColumn
from recd_plugins.sparse.memory import copy_bytes, int32_at
from recd_plugins.sparse.memory import prefetch as prefetch_line
from recd_plugins.sparse.partial import RowPacker

__all__ = [
    "BrokenListError",
    "Deduplicator",
    "DictionaryColumn",
    "JaggedColumn",
    "Nulls",
    "RowPacker",
    "StatisticsAccumulator",
    "TableWriter",
    "broken_list",
    "choose_layouts",
    "copy_bytes",
    "dense_features",
    "dictionary_column",
    "int32_at",
    "labels",
    "place",
    "prefetch_line",
    "session_column",
    "sparse_column",
]
