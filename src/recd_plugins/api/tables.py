"""Tables on disk: Parquet files anywhere, lists in dictionaries, filters, statistics in footers.

For datasets and commands that read tables. Needs pyarrow and neither torch nor numba: what writes
tables is in ``recd_plugins.api.columns``.
"""

from recd_plugins.data.list_dict import (
    Layout,
    decoded_field,
    id_features,
    is_id_list,
    is_list_dict,
    list_dict_field,
    to_list_dict,
    to_lists,
)
from recd_plugins.data.parquet import ParquetTable, read_footers, read_metadata
from recd_plugins.data.row_filter import Condition
from recd_plugins.data.row_groups import ReadOptions, check_int96, int96_columns
from recd_plugins.data.storage import Location, Url
from recd_plugins.values.rows import Storage
from recd_plugins.values.statistics import (
    FeatureStatistics,
    TableStatistics,
    dedupe_factor,
    least_ids_saved,
)

__all__ = [
    "Condition",
    "FeatureStatistics",
    "Layout",
    "Location",
    "ParquetTable",
    "ReadOptions",
    "Storage",
    "TableStatistics",
    "Url",
    "check_int96",
    "decoded_field",
    "dedupe_factor",
    "id_features",
    "int96_columns",
    "is_id_list",
    "is_list_dict",
    "least_ids_saved",
    "list_dict_field",
    "read_footers",
    "read_metadata",
    "to_list_dict",
    "to_lists",
]
