"""Rows that are drawn: dense features and labels, and the options that say how."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from recd_plugin_dlrm.draws import stream_of
from recd_plugins.api import DataError, FeatureSchema, PluginOptions, Split
from recd_plugins.api.reading import Unit

#: Rows that are made, stored and read at once.
UNIT_ROWS = 4096
LABEL = "label"


class DrawnRowOptions(PluginOptions):
    """Options of datasets whose dense features and labels are drawn."""

    rows: PositiveInt = Field(description="Rows of an epoch.")
    test_rows: NonNegativeInt = Field(default=0, description="Rows of the test split; 0 has none.")
    seed: NonNegativeInt = Field(default=0, description="Seed of every draw.")
    dense: NonNegativeInt = Field(default=13, description="Dense features: dense_0 and so on.")
    dense_distribution: Literal["uniform", "normal"] = Field(
        default="uniform", description="Of dense features: uniform over 0 to 1, or normal."
    )
    dense_mean: float = Field(
        default=0.0, allow_inf_nan=False, description="Mean of normal dense features."
    )
    dense_std: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="Their standard deviation."
    )
    labels: Literal["random", "learnable"] = Field(
        default="random",
        description="random: a rounded uniform number, which nothing tells; learnable: with odds "
        "that follow dense features and hidden effects of ids.",
    )
    prefetch: NonNegativeInt = Field(
        default=4, description="Batches made ahead in a thread; 0 makes them in the trainer's own."
    )

    @model_validator(mode="after")
    def _moments_are_of_normal_features(self) -> Self:
        changed = (self.dense_mean, self.dense_std) != (0.0, 1.0)
        if changed and self.dense_distribution == "uniform":
            raise ValueError(
                "dense_mean and dense_std are for dense_distribution: normal, and it is uniform"
            )
        return self


@dataclass(frozen=True, eq=False)
class FeatureLists:
    """The ids of one feature: int32 offsets ``[rows + 1]`` and int64 ids ``[offsets[-1]]``."""

    offsets: NDArray[np.int32]
    ids: NDArray[np.int64]


def schema_of(options: DrawnRowOptions, features: tuple[str, ...]) -> FeatureSchema:
    """Sparse features, dense features, label."""
    return FeatureSchema(features, _dense_names(options), LABEL)


def check_features(options: DrawnRowOptions, features: tuple[str, ...]) -> None:
    """Refuse sparse features with the names of other columns, or of each other.

    Raises:
        DataError: which.
    """
    taken = {LABEL, *_dense_names(options)}
    for place, name in enumerate(features):
        if name in taken or name in features[:place]:
            raise DataError(f"sparse feature {name}: another column has that name; choose another")


def make_rows(
    options: DrawnRowOptions, first_row: int, num_rows: int, lists: Mapping[str, FeatureLists]
) -> pa.RecordBatch:
    """Columns of the schema: those of ``lists``, dense features as float32, the label as int8.

    Args:
        options: how to draw.
        first_row: of the whole table.
        lists: of these rows, by feature.
    """
    from recd_plugin_dlrm import random_kernels as kernels

    names = _dense_names(options)
    logit = np.zeros(num_rows, np.float64)
    dense = []
    for number in range(options.dense):
        stream = stream_of(options.seed, "dense", number)
        if options.dense_distribution == "uniform":
            drawn = kernels.uniforms(stream, first_row, num_rows)
            standard, values = (drawn - 0.5) * math.sqrt(12), drawn
        else:
            standard = kernels.normals(stream, first_row, num_rows)
            values = options.dense_mean + options.dense_std * standard
        logit += standard / math.sqrt(options.dense)
        dense.append(values.astype(np.float32))
    drawn = kernels.uniforms(stream_of(options.seed, "label"), first_row, num_rows)
    if options.labels == "random":
        labels = drawn >= 0.5
    else:
        effects = np.zeros(num_rows, np.float64)
        for name, each in lists.items():
            kernels.add_effects(
                stream_of(options.seed, "effects", name), each.offsets, each.ids, effects
            )
        logit += 2 * effects / math.sqrt(max(1, len(lists)))
        labels = drawn < 1 / (1 + np.exp(-logit))
    columns = [pa.ListArray.from_arrays(each.offsets, each.ids) for each in lists.values()]
    return pa.RecordBatch.from_arrays(
        [*columns, *map(pa.array, dense), pa.array(labels.astype(np.int8))],
        names=[*lists, *names, LABEL],
    )


def units_of(options: DrawnRowOptions, split: Split, name: str) -> tuple[Unit, ...]:
    """The rows of a split; those of the test split stand behind all others.

    Raises:
        DataError: there is no test split.
    """
    if split == "test" and not options.test_rows:
        raise DataError(f"there is no test split: set option test_rows of {name}")
    start, stop = 0, options.rows
    if split == "test":
        start, stop = stop, stop + options.test_rows
    return tuple(
        Unit(0, number, first, min(UNIT_ROWS, stop - first))
        for number, first in enumerate(range(start, stop, UNIT_ROWS))
    )


def _dense_names(options: DrawnRowOptions) -> tuple[str, ...]:
    return tuple(f"dense_{number}" for number in range(options.dense))
