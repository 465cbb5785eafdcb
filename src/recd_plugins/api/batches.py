"""Batches as tensors: jagged tensors without duplicate rows, what a model takes, how they are made.

For converters, preprocessing and poolings, which import it inside methods. Needs torch and
TorchRec.
"""

from recd_plugins.data.fitted_steps import build_preprocess, fitted_steps, num_dense_inputs
from recd_plugins.data.lower import lower
from recd_plugins.data.preprocess import Preprocess
from recd_plugins.data.row_pipeline import RowPipeline, fitted_transforms
from recd_plugins.data.wrapped_dataset import smallest_batch
from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor
from recd_plugins.sparse.from_columns import (
    ikjts_from_columns,
    ikjts_from_dictionaries,
    kjt_from_columns,
    partial_from_columns,
    partial_from_dictionaries,
)
from recd_plugins.sparse.index_select import jagged_index_select
from recd_plugins.sparse.jagged import offsets_of, positions_of_ranges, rounded_borders
from recd_plugins.values.batch import Batch, ModelInput, Placement

__all__ = [
    "Batch",
    "InverseKeyedJaggedTensor",
    "ModelInput",
    "PartialInverseKeyedJaggedTensor",
    "Placement",
    "Preprocess",
    "RowPipeline",
    "build_preprocess",
    "fitted_steps",
    "fitted_transforms",
    "ikjts_from_columns",
    "ikjts_from_dictionaries",
    "jagged_index_select",
    "kjt_from_columns",
    "lower",
    "num_dense_inputs",
    "offsets_of",
    "partial_from_columns",
    "partial_from_dictionaries",
    "positions_of_ranges",
    "rounded_borders",
    "smallest_batch",
]
