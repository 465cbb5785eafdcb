from __future__ import annotations

import re
from dataclasses import fields
from inspect import signature

import pytest
from tests.docs.pages import blocks, page
from tests.sharded import bags, one_rank, plan_of
from torchrec.distributed.types import ShardingPlan

from recd_plugins.api import (
    ExactEmbeddingBagCollectionSharder,
    Sharding,
    StepShape,
    TableStrategy,
    stage_costs,
)
from recd_plugins.interfaces import SharderArguments

PAGE = page("plugins/sharding.md")


@pytest.mark.parametrize(
    ("cls", "heading"), [(Sharding, "Methods of Sharding"), (TableStrategy, "TableStrategy")]
)
def test_methods_have_the_parameters_of_the_page(cls: type, heading: str) -> None:
    rows = re.findall(r"^\| `.*?\|", PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0], re.M)
    shown = re.findall(r"`(\w+)\(([^)]*)\)`", "".join(rows))
    assert shown
    for name, parameters in shown:
        known = [each for each in signature(getattr(cls, name)).parameters if each != "self"]
        assert parameters.split(", ") * bool(parameters) == known, name


def test_fields_exist() -> None:
    costs = [field.name for field in fields(stage_costs.StepCost) if field.name != "steps"]
    for name in [*costs, *StepShape._fields]:
        assert f"`{name}`" in PAGE
    used = set(re.findall(r"arguments\.(\w+)", PAGE))
    assert used == set(SharderArguments._fields)


def test_a_table_moves_to_a_rank() -> None:
    (code,) = (each for each in blocks(PAGE, "py") if "table_wise" in each)
    module, sharder = bags("clicks"), ExactEmbeddingBagCollectionSharder({})
    with one_rank():
        plan = ShardingPlan({"": plan_of(module, "table_wise", sharder, 1, 1)})
        names = {"path": "", "table": "t_clicks", "rank": 1, "world_size": 2, "ranks_per_node": 2}
        prepared = type("Prepared", (), {"model": module})
        exec(code, {**names, "plan": plan, "sharder": sharder, "prepared": prepared})
    moved = plan.plan[""]["t_clicks"]
    assert moved.ranks == [1]
    assert str(moved.sharding_spec.shards[0].placement) == "rank:1/cpu"
