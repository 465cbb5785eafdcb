"""A plan that shards a table otherwise than its entry asks is refused."""

from __future__ import annotations

import pytest
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ParameterSharding

from recd_plugins.distributed.entry_constraints import EntryConstraints, check_plan
from recd_plugins.errors import SetupError

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
