"""What entries ask of a plan; one that shards a table otherwise is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ParameterSharding

from recd_plugins.distributed.entry_constraints import (
    EntryConstraints,
    check_plan,
    entry_constraints,
)
from recd_plugins.errors import PluginError, SetupError
from recd_plugins.interfaces import Sharding, Table, TablePart
from recd_plugins.planning.prepared import Prepared
from recd_plugins.registry import Entry
from recd_plugins.registry.from_file import registry_without_file
from recd_plugins.values.batch import Placement

PLAN = {"a": ParameterSharding("row_wise", "fused", [0]), "b": ParameterSharding("x", "y", [0])}


def asked(**constraints: list[str]) -> list[EntryConstraints]:
    return [
        EntryConstraints(
            "r.yaml:3 cache[0]: ", "acme.fast", {"a": ParameterConstraints(**constraints)}
        )
    ]


@pytest.mark.parametrize(
    ("constraints", "wrong"),
    [
        (
            {"sharding_types": ["table_wise", "column_wise"]},
            "table_wise or column_wise of table a, and the plan has row_wise",
        ),
        ({"compute_kernels": ["fused_uvm"]}, "fused_uvm of table a, and the plan has fused"),
    ],
)
def test_what_differs_is_named(constraints: dict[str, list[str]], wrong: str) -> None:
    with pytest.raises(SetupError, match=rf"^r\.yaml:3 cache\[0\]: acme\.fast asks for {wrong}: "):
        check_plan(asked(**constraints), PLAN)


def test_what_agrees_or_is_elsewhere_passes() -> None:
    check_plan(asked(sharding_types=["row_wise"], compute_kernels=["fused", "dense"]), PLAN)
    check_plan(asked(), PLAN)
    check_plan(asked(sharding_types=["table_wise"]), {"b": PLAN["b"]})


class Asks(Sharding):
    """Has a part that constrains, too."""

    name = "acme.asks"
    asked: ParameterConstraints

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        return {table.name: self.asked for table in tables}


class AskingPart(TablePart):
    def __init__(self, asked: ParameterConstraints) -> None:
        self.asked = asked

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        return {table.name: self.asked for table in tables}


def of_plugin_and_part(
    of_plugin: ParameterConstraints, of_part: ParameterConstraints
) -> Mapping[str, ParameterConstraints]:
    plugin = Asks(Asks.Options())
    plugin.asked = of_plugin
    entry = Entry(plugin, ("a",), "sharding[0]", 3)
    registry = replace(registry_without_file(), sharding=(entry,))
    parts = {"sharding[0]": AskingPart(of_part)}
    prepared = Prepared(registry, nn.Module(), Placement(), {}, parts=parts)
    (found,) = entry_constraints(prepared, [Table("a", ("x",), 9, 4, pooled=True)])
    return found.of_tables


def test_what_a_plugin_asks_is_merged_with_what_its_part_asks() -> None:
    rows = ParameterConstraints(sharding_types=["row_wise"])
    both = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
    assert of_plugin_and_part(rows, ParameterConstraints(compute_kernels=["fused"])) == {"a": both}
    assert of_plugin_and_part(rows, both) == {"a": both}
    tables = ParameterConstraints(sharding_types=["table_wise"])
    words = r"acme\.asks: .* part set different sharding_types of table a \(\['row_wise'\] and"
    with pytest.raises(PluginError, match=words):
        of_plugin_and_part(rows, tables)
