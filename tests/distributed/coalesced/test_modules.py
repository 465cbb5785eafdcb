"""Modules with coalesced tables do what they do without, and send what is distinct."""

from __future__ import annotations

import pytest
import torch
from tests.distributed.coalesced import coalesced_cases as cases
from tests.distributed.coalesced.coalesced_cases import DIM, FEATURES, Module
from torchrec.modules.embedding_configs import EmbeddingConfig, PoolingType

from recd_plugins.runtime.errors import SetupError
from recd_plugins.sharding.coalesced import input_dist
from recd_plugins.sharding.coalesced.groups import feature_groups
from recd_plugins.testing.gloo import run_on_ranks

ALL = tuple(FEATURES)
SOME = ("t0", "t3")
OTHERS = ("t0", "t1", "t2")
SHARDINGS = ("table_wise", "row_wise", "column_wise", "mixed")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN, None])
def test_outputs_weights_and_optimizer_state_are_those_without(
    pooling: PoolingType | None, world_size: int
) -> None:
    """Of bags, and without pooling of sequences."""
    kind = "sequences" if pooling is None else "bags"
    modules = [
        Module(kind, sharding, coalesced, pooling=pooling or PoolingType.SUM)
        for sharding in SHARDINGS
        for coalesced in (ALL, SOME, OTHERS)
    ]
    modules.append(Module(kind, "row_wise", ALL, dtype=torch.int32))
    for found in run_on_ranks(cases.differences, world_size, modules):
        for module, difference in zip(modules, found, strict=True):
            assert difference <= 2e-6, module


@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_without_ids_may_have_an_empty_row(world_size: int) -> None:
    """In the third batch rank 0 has no id at all."""
    modules = [
        Module("bags", sharding, coalesced, pooling=pooling)
        for sharding in SHARDINGS
        for coalesced, pooling in ((ALL, PoolingType.MEAN), (SOME, PoolingType.SUM))
    ]
    for found in run_on_ranks(cases.differences_with_empty_rows, world_size, modules):
        for module, difference in zip(modules, found, strict=True):
            assert difference <= 2e-6, module


def test_on_cuda_bags_have_as_many_rows_as_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM's kernels there divide by their ratio, as a whole number."""
    monkeypatch.setattr(input_dist, "_takes_no_rows", lambda _: False)
    configs = cases.bags().embedding_bag_configs()  # type: ignore[operator]
    groups = feature_groups(configs, ALL)
    assert groups is not None
    for step in range(3):
        features = cases.batch(0, step, weighted=False, dtype=torch.int64)
        unique, _ = input_dist.coalesce_bags(features, groups)
        rows = dict(zip(unique.keys(), unique.stride_per_key(), strict=True))
        for group in groups.groups:
            assert sum(rows[name] for name in group) >= len(group), step


def test_weighted_bags() -> None:
    modules = [
        Module("bags", sharding, coalesced, weighted=True)
        for sharding in ("table_wise", "row_wise")
        for coalesced in (ALL, SOME, OTHERS)
    ]
    for found in run_on_ranks(cases.differences, 2, modules):
        for module, difference in zip(modules, found, strict=True):
            assert difference <= 2e-6, module


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_what_is_sent_is_what_is_distinct(kind: str) -> None:
    by_rank = run_on_ranks(cases.sent, 2, kind, "row_wise", True)
    # Tables of a group: two look s up. Half of each is this rank's, wherever its rows are.
    tables = {"ab": 1, "s": 2, "c": 1, "d": 1}
    distinct = [sum(tables[name] * n for name, n in found.items()) for _, _, found in by_rank]
    assert sum(ids for _, ids, _ in by_rank) == sum(distinct)
    received = [total["forward floats"] + total["backward floats"] for total, _, _ in by_rank]
    plain = run_on_ranks(cases.sent, 2, kind, "row_wise", False)
    assert sum(ids for _, ids, _ in plain) > sum(distinct)
    if kind == "sequences":
        # Of embeddings and their gradients, only what crosses ranks is sent.
        assert sum(received) < 2 * 4 * DIM * sum(distinct)
        before = sum(t["forward floats"] + t["backward floats"] for t, _, _ in plain)
        assert sum(received) < before


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_embeddings_come_once_for_each_distinct_id(kind: str) -> None:
    """Tables 0 and 2 are rank 0's, tables 1 and 3 rank 1's."""
    (zero, _, of_zero), (one, _, of_one) = run_on_ranks(cases.sent, 2, kind, "table_wise", True)
    from_zero = 4 * DIM * (of_one["ab"] + of_one["s"] + of_one["c"])
    from_one = 4 * DIM * (of_zero["s"] + of_zero["d"])
    assert zero["forward floats"] == one["backward floats"] == from_zero
    assert one["forward floats"] == zero["backward floats"] == from_one


def test_refusals() -> None:
    (found,) = run_on_ranks(cases.refusals, 1)
    expected = ["table t0 is data-parallel or", "table t3 is data-par", "feature s looks up tables"]
    expected += ["leave use_index_dedup away"]
    expected += ["tables t3 are to be coalesced and have gradient_clipping, which"] * 2
    for words, message in zip(expected, found, strict=True):
        assert words in message


def test_names_that_are_taken_for_others() -> None:
    """Outputs of a feature of several tables are feature@table."""
    configs = [
        EmbeddingConfig(name=f"t_{name}", embedding_dim=4, num_embeddings=8, feature_names=[name])
        for name in ("clicks@7d", "other")
    ]
    assert feature_groups(configs, []) is None
    with pytest.raises(
        SetupError, match=r"features clicks@7d have an @ .* is to be coalesced, for"
    ):
        feature_groups(configs, ["t_clicks@7d"])


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_ids_out_of_their_table_are_what_they_are_without(kind: str) -> None:
    for coalesced, plain in run_on_ranks(cases.out_of_range, 1, kind):
        torch.testing.assert_close(coalesced, plain)
