"""Constraints of plugins that TorchRec's planner does not take are refused by name and line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import BoundsCheckMode, CacheParams
from torchrec.types import DataType

from recd_plugins.distributed.checked_constraints import check_constraints
from recd_plugins.distributed.entry_constraints import entry_constraints
from recd_plugins.errors import PluginError
from recd_plugins.interfaces import PluginOptions, Sharding, Table, TablePart
from recd_plugins.registry import Entry
from recd_plugins.registry.checked_part import CheckedPart


class Acme(Sharding):
    """Leaves what it asks for to its part."""

    name = "acme.asks"


class Part(TablePart):
    """Asks for what it was made with."""

    def __init__(self, field: str, value: object) -> None:
        self._asked: dict[str, Any] = {field: value}

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        return {table.name: ParameterConstraints(**self._asked) for table in tables}


PLUGIN = Acme(PluginOptions()).placed(("registry.yaml", 7, "sharding[0]"))
TABLE = Table("t", ("a", "b"), 100, 8, pooled=True)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("sharding_types", 5, "a list of texts, as [ShardingType.ROW_WISE.value]"),
        ("sharding_types", iter(["row_wise"]), "a list of texts, as [ShardingType.ROW_WISE"),
        ("sharding_types", ["row_wsie"], "did you mean row_wise?"),
        ("sharding_types", [], "at least one, as [ShardingType.ROW_WISE.value], or None where any"),
        ("compute_kernels", (), "at least one, as [EmbeddingComputeKernel.FUSED.value], or None"),
        ("compute_kernels", {"fused": 1}, "a list of texts, as [EmbeddingComputeKernel.FUSED"),
        ("min_partition", "8", "a whole number"),
        ("min_partition", True, "a whole number"),
        ("min_partition", -4, "a whole number that is not below 0"),
        ("pooling_factors", None, "a list of finite numbers"),
        ("pooling_factors", 1.0, "a list of finite numbers"),
        ("pooling_factors", ["1", 2], "a list of finite numbers"),
        ("pooling_factors", np.ones(2), "a list of finite numbers"),
        ("pooling_factors", [1.0, float("inf")], "finite numbers, none of them below 0"),
        ("pooling_factors", [3.0], "one for each of its features, a, b"),
        ("num_poolings", [1.0], "one for each of its features, a, b"),
        ("batch_sizes", [8, 1.5], "a list of finite whole numbers"),
        ("batch_sizes", [8, 0], "finite whole numbers, none of them below 1"),
        ("batch_sizes", [8, 8, 8], "one for each of its features, a, b"),
        ("is_weighted", "yes", "True or False"),
        ("enforce_hbm", 1, "True or False"),
        ("cache_params", 0.5, "TorchRec's CacheParams"),
        ("bounds_check_mode", "fatal", "TorchRec's BoundsCheckMode"),
        ("feature_names", "a", "a list of texts"),
        ("output_dtype", "fp16", "TorchRec's DataType"),
        ("device_group", "gpu", "cpu or cuda"),
        ("device_group", 5, "cpu or cuda"),
    ],
)
def test_it_names_the_line_the_field_and_what_is_expected(
    field: str, value: Any, expected: str
) -> None:
    with pytest.raises(PluginError) as caught:
        check_constraints(PLUGIN, TABLE, ParameterConstraints(**{field: value}))
    said = str(caught.value)
    begins = f"registry.yaml:7 sharding[0]: acme.asks: constraints returned {field} "
    assert said.startswith(begins), said
    assert " for table t; expected " in said
    assert said.endswith(expected) or expected in said.partition("; expected ")[2], said


def test_what_torchrec_takes_is_left_alone() -> None:
    check_constraints(PLUGIN, TABLE, ParameterConstraints())
    check_constraints(
        PLUGIN,
        TABLE,
        ParameterConstraints(
            sharding_types=["row_wise"],
            compute_kernels=["fused"],
            min_partition=4,
            pooling_factors=[1, 2.5],
            num_poolings=[1.0, 2],
            batch_sizes=[8, 16],
            is_weighted=True,
            cache_params=CacheParams(load_factor=0.5),
            enforce_hbm=False,
            stochastic_rounding=True,
            bounds_check_mode=BoundsCheckMode.FATAL,
            feature_names=["a", "b"],
            output_dtype=DataType.FP16,
            device_group="cuda",
        ),
    )


@pytest.mark.parametrize(
    ("field", "value"), [("sharding_types", ["row_wsie"]), ("min_partition", "8")]
)
def test_those_of_a_part_name_the_line_of_its_entry(field: str, value: object) -> None:
    entry = Entry[Sharding](PLUGIN, ("t",), "sharding[0]", 7)
    path = Path("registry.yaml")
    registry = SimpleNamespace(path=path, sharding=(entry,), cache=())
    part = CheckedPart(path, entry, Part(field, value))
    prepared: Any = SimpleNamespace(registry=registry, checked_parts=(part,))
    with pytest.raises(PluginError) as caught:
        entry_constraints(prepared, [TABLE])
    begins = f"registry.yaml:7 sharding[0]: acme.asks: constraints returned {field} {value!r} for "
    assert str(caught.value).startswith(begins)
