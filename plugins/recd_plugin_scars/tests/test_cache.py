from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tests.commands import refusal
from tests.planning.test_work import NOTHING, plan

from recd_plugin_scars.cache import CacheStrategy, ScarsCache
from recd_plugin_scars.runtime.policies import TableCache
from recd_plugin_scars.tests.cache_cases import write_registry
from recd_plugins.interfaces import PlanContext, Table
from recd_plugins.interfaces.access import AccessProfile
from recd_plugins.interfaces.data_profile import DataProfile, FeatureProfile
from recd_plugins.planning.step_cost import estimate_step_cost
from recd_plugins.planning.topologies import this_machine
from recd_plugins.runtime.errors import DataError, SetupError
from recd_plugins.testing.contracts import CacheContract
from recd_plugins.testing.contracts.tables import SkewedData

TABLES = (
    Table("t_user", ("user",), 1000, 16, pooled=True),
    Table("t_history", ("history",), 500, 8, pooled=False),
)


def plugin(**options: Any) -> ScarsCache:
    return ScarsCache(ScarsCache.Options.model_validate(options))


@pytest.fixture
def context() -> PlanContext:
    """Two ranks with a GiB each, whose data reads an eighth of the rows much more often."""
    sizes: dict[str, Any] = {"world_size": 2, "ranks_per_node": 2, "batch_size": 64}
    sizes |= {"rates": this_machine(2).collective_rates, "memory_bytes": 2**30}
    return PlanContext(optimizer="rowwise_adagrad", device_type="cpu", data=SkewedData(), **sizes)


@pytest.mark.parametrize(
    "options", [{"rows": 100}, {"share": 0.5}, {"bytes": "10KB"}, {}, {"policy": "lru", "rows": 0}]
)
class TestContract(CacheContract):
    @pytest.fixture
    def plugin(self, options: dict[str, Any]) -> ScarsCache:
        return plugin(**options)


def part(context: PlanContext, tables: Sequence[Table] = TABLES, **options: Any) -> CacheStrategy:
    made = plugin(**options).strategy(tables, context)
    assert made is not None
    return made


def caches_of(context: PlanContext, *tables: Any, **options: Any) -> Mapping[str, TableCache]:
    return part(context, *tables, **options).caches


def cached(context: PlanContext, **options: Any) -> dict[str, int]:
    caches = caches_of(context, **options)
    return {t.name: caches[t.name].num_cached_rows(t.num_embeddings) for t in TABLES}


def test_rows_and_share(context: PlanContext) -> None:
    assert cached(context, rows=100) == {"t_user": 100, "t_history": 100}
    assert cached(context, share=0.1) == {"t_user": 100, "t_history": 50}


def test_bytes_go_to_what_is_read_most(context: PlanContext) -> None:
    rows = cached(context, bytes="9000B")
    width = {"t_user": 4 * 16 + 4, "t_history": 4 * 8 + 4}  # with state
    taken = sum(count * width[name] for name, count in rows.items())
    assert 9000 - max(width.values()) < taken <= 9000
    assert rows["t_user"] + rows["t_history"] < 1000 // 8 + 500 // 8 + 100


def test_what_pays_is_what_is_read_more_than_once(context: PlanContext) -> None:
    """SkewedData reads every row, so that all pay where memory allows."""
    assert cached(context) == {"t_user": 1000, "t_history": 500}
    tables_take = 1000 * (4 * 16 + 4) + 500 * (4 * 8 + 4)
    small = replace(context, memory_bytes=tables_take // 2 + 2000)
    beside = sum(cached(small).values())
    assert 2000 // (4 * 16 + 4) - 1 <= beside <= 2000 // (4 * 8 + 4)
    assert sum(cached(small, storage={"file": "slow"}).values()) > 10 * beside


def test_the_rest_of_the_options_arrives(context: PlanContext) -> None:
    cache = caches_of(context, rows=1, lookahead=False, policy="lfu")["t_user"]
    assert (cache.policy, cache.lookahead, cache.folder) == ("lfu", False, None)
    cache = caches_of(context, rows=1, storage={"file": "f"})["t_user"]
    assert cache.folder == Path("f")


def test_the_plan_predicts_traffic(context: PlanContext) -> None:
    plan: Any = part(context, rows=125)._plan
    assert plan.batch_size == 128
    user = plan.tables["t_user"].traffic
    assert 0 < user.misses < user.unique_rows
    of_lru: Any = part(context, TABLES[:1], rows=1000, policy="lru")._plan
    assert of_lru.tables


def test_caches_larger_than_the_device(context: PlanContext) -> None:
    huge = (Table("t_user", ("user",), 1_000_000, 4096, pooled=True),)
    with pytest.raises(SetupError, match=r"need 15\.\d\d GiB, but the 2 ranks"):
        plugin(share=1).strategy(huge, context)


def test_a_profile_of_other_tables(context: PlanContext, tmp_path: Path) -> None:
    path = tmp_path / "accesses.parquet"
    context.data.access(TABLES[:1], None).save(path)
    with pytest.raises(DataError, match="does not contain table 't_history'"):
        plugin(profile=path).strategy(TABLES, context)
    larger = replace(TABLES[0], num_embeddings=2000)
    with pytest.raises(DataError, match=r"1,000 rows for table 't_user', but the model has 2,000"):
        plugin(profile=path).strategy([larger], context)
    counts = AccessProfile.load(path).tables["t_user"]
    found = caches_of(context, TABLES[:1], profile=path, rows=7)["t_user"]
    np.testing.assert_array_equal(found.first_hot_rows("t_user", 1000), counts.rows[:7])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 1, "share": 0.1}, "'rows' and 'share' all set"),
        ({"share": 0.1, "bytes": 7}, "'share' and 'bytes' all set"),
        ({"bytes": "7 parsecs"}, "256MB"),
        ({"share": 1.5}, "less than or equal to 1"),
        ({"rows": -1}, "greater than or equal to 0"),
        ({"policy": "fifo"}, "static"),
        ({"storage": {"folder": "f"}}, "file"),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        plugin(**options)


@pytest.mark.parametrize(
    ("options", "sections", "messages"),
    [
        ({"rows": 3000}, {}, ["cache[0]", "has only 2,000"]),
        ({"profile": "nowhere.parquet"}, {}, ["cache[0]", "nowhere.parquet"]),
        (
            {"rows": 10},
            {"sharding": [{"use": "torchrec.data_parallel", "tables": ["t_item_0"]}]},
            ["cache[0]", "table 't_item_0' has a cache", "sharding[0]", "every rank"],
        ),
        (
            {"rows": 10},
            {"sharding": [{"use": "flexshard.two_tier", "tables": ["t_seq_*"]}]},
            ["cache[0]", "table 't_seq_0_0' has a cache", "two_tier", "caches do not support"],
        ),
    ],
)
def test_refusals_name_the_line(
    table: Path, tmp_path: Path, options: dict[str, Any], sections: Any, messages: list[str]
) -> None:
    path = write_registry(tmp_path / "r.yaml", table, options, **sections)
    lines = path.read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "scars.cache" in text)
    said = refusal("plan", path)
    assert all(message in said for message in [f"{path}:{line}", *messages]), said


def test_fbgemm_caches_rows_on_cuda_unless_in_files_or_static(context: PlanContext) -> None:
    on_cuda = replace(context, device_type="cuda")
    for where, options, policy, uvm in (
        (on_cuda, {}, "lru", True),
        (on_cuda, {"policy": "lfu"}, "lfu", True),
        (on_cuda, {"policy": "static"}, "static", False),
        (on_cuda, {"storage": {"file": "rows"}}, "static", False),
        (context, {}, "static", False),
        (context, {"policy": "lru"}, "lru", False),
    ):
        cache = caches_of(where, rows=10, **options)["t_user"]  # type: ignore[arg-type]
        assert (cache.policy, cache.uvm) == (policy, uvm), options


def test_fbgemm_gets_the_policy_and_the_planned_size(context: PlanContext) -> None:
    on_cuda = replace(context, device_type="cuda")
    for policy, prefetches in (("lru", True), ("lfu", False)):
        params = part(on_cuda, policy=policy, rows=100).constraints(TABLES)["t_user"].cache_params
        assert params.algorithm.name.lower() == policy
        assert params.load_factor == 0.1
        assert params.prefetch_pipeline is prefetches


@pytest.mark.parametrize(
    ("shards", "moved"),
    [([(1, 100, 8)], [0, 400]), ([(0, 25, 8), (1, 75, 8)], [100, 300]), ([(0, 100, 4)] * 2, [400])],
)
def test_backing_stores_move_rows_where_they_are(
    shards: list[tuple[int, int, int]], moved: list[int]
) -> None:
    known = DataProfile({"f": FeatureProfile(3.0)})
    caches = {"t": TableCache("lru", 0.5), "u": TableCache("lru", 0.5, folder=Path("u"))}
    t, u = (SimpleNamespace(traffic=SimpleNamespace(bytes=each)) for each in (400, 7))
    expected: Any = SimpleNamespace(tables={"t": t, "u": u})
    ranks = estimate_step_cost(
        [Table("t", ("f",), 100, 8, True)], plan("row_wise", *shards), known, NOTHING,
        batch_size=10, world_size=len(moved),
        parts=[CacheStrategy(caches, expected)],
    )  # fmt: skip
    assert [work.bytes_from_host for work in ranks] == moved
    assert not any(work.bytes_from_file for work in ranks)
