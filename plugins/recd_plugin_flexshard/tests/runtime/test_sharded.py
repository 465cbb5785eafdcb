"""A tiered collection does what one without tiers does, or says that it does not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CowClipDefinition,
    WeightDecayMode,
)
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig

from recd_plugin_flexshard.runtime import RowTiers
from recd_plugin_flexshard.tests.runtime import module_cases as cases
from recd_plugin_flexshard.tests.runtime.module_cases import Attempt
from recd_plugins.runtime.errors import ExactnessError, RecdError, SetupError
from recd_plugins.runtime.launch import launch
from recd_plugins.testing.gloo import run_on_ranks


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("fused", [cases.SGD, cases.ADAGRAD], ids=["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("procedure", cases.PROCEDURES)
def test_it_trains_as_without_tiers(
    procedure: str, fused: Mapping[str, Any], ranks_per_node: int
) -> None:
    for without, *with_tiers in run_on_ranks(
        cases.weights_after, 2, procedure, fused, local_world_size=ranks_per_node
    ):
        initial = cases.collection().state_dict()
        assert any(not torch.equal(each, initial[name]) for name, each in without.items())
        for weights in with_tiers:
            torch.testing.assert_close(weights, without, rtol=1e-5, atol=1e-6)


def test_a_row_that_never_had_a_gradient_stays_with_eps_0() -> None:
    fused = cases.ADAGRAD | {"eps": 0.0}
    for without, *with_tiers in run_on_ranks(cases.weights_after, 2, "a_step", fused):
        for weights in with_tiers:
            torch.testing.assert_close(weights, without)


@pytest.mark.parametrize("need_indices", [False, True])
def test_outputs(need_indices: bool) -> None:
    for without, with_tiers in run_on_ranks(cases.outputs, 4, need_indices, local_world_size=2):
        assert list(with_tiers) == list(without)
        for name, (values, lengths, ids) in without.items():
            assert torch.equal(with_tiers[name][0], values)
            assert torch.equal(with_tiers[name][1], lengths)
            assert (ids is not None) == need_indices
            torch.testing.assert_close(with_tiers[name][2], ids)


def test_all_lookups_are_counted() -> None:
    with_tiers, without = (
        run_on_ranks(cases.seen, 4, tiers, local_world_size=2) for tiers in (True, False)
    )
    for feature in ("f", "g", "h"):
        assert sum(seen.ids[feature] for seen in with_tiers) == 4 * len(
            [id for row in cases.IDS[feature] for id in row]
        )
        assert sum(seen.ids[feature] for seen in without) == sum(
            seen.ids[feature] for seen in with_tiers
        )


def test_trackers_of_changed_rows_are_refused() -> None:
    ((refused, without),) = run_on_ranks(cases.tracked, 1)
    assert isinstance(refused, SetupError)
    assert "does not see which copies of tables with tiers have changed, as of t" in str(refused)
    assert without is None


def test_traffic_by_tier() -> None:
    for seen in run_on_ranks(cases.seen, 4, True, local_world_size=2):
        scalars = 4 * cases.DIM
        assert seen.bytes["hot"] == 2 * (2 * scalars) * 3 // 4
        held = [2, 2]  # of four flex rows, on either rank of a node
        assert seen.bytes["flex_gradients"] == 2 * (held[0] * scalars) * 1 // 2
        assert seen.bytes["flex"] > 0
        assert seen.bytes["cold"] > 0
        # DistributedDataParallel is not there, so nothing else is sent than whether somebody may
        # have written into the state dict that was taken before.
        assert seen.bytes["other"] == 2 * 4 * 3 // 4


def test_traffic_of_touched_rows() -> None:
    """All ranks look up all rows that have copies, of which each tier has two on a rank."""
    ranks = run_on_ranks(cases.seen, 4, True, ("hot", "flex"), local_world_size=2)
    row, bits = 4 * cases.DIM, 1
    # A rank sends its gradients, but those that it sums, and what it sums to all others.
    assert sum(seen.bytes["hot"] for seen in ranks) == 4 * 3 * bits + (3 + 3) * 2 * row
    for seen in ranks:
        assert seen.bytes["flex_gradients"] == bits + 2 * row


def table(name: str = "t", features: str = "f", **arguments: Any) -> EmbeddingConfig:
    return EmbeddingConfig(
        name=name,
        embedding_dim=cases.DIM,
        num_embeddings=9,
        feature_names=features.split(),
        **arguments,
    )


T = {"t": RowTiers([1])}
SGD, ADAGRAD = cases.SGD, cases.ADAGRAD
COWCLIP: dict[str, Any] = {
    "cowclip_regularization": CowClipDefinition(),
    "weight_decay_mode": WeightDecayMode.COWCLIP,
}
REFUSED: list[tuple[str, type[RecdError], Attempt]] = [
    ("planned as table_wise", SetupError, Attempt(T, SGD, [table()], "table_wise")),
    ("planned as data_parallel", SetupError, Attempt(T, SGD, [table()], "data_parallel")),
    ("kernel dense", SetupError, Attempt(T, SGD, [table()], "row_wise, dense")),
    (
        "feature f looks up tables t and u",
        SetupError,
        Attempt(T, SGD, [table(), table("u")], "row_wise"),
    ),
    (
        "optimizer exact_adagrad",
        ExactnessError,
        Attempt(T, SGD | {"optimizer": EmbOptimType.EXACT_ADAGRAD}, [table()], "row_wise"),
    ),
    (
        "weight_decay",
        SetupError,
        Attempt(T, ADAGRAD | {"weight_decay": 0.1}, [table()], "row_wise"),
    ),
    (
        "gradient_clipping=True",
        ExactnessError,
        Attempt(T, SGD | {"gradient_clipping": True}, [table()], "row_wise"),
    ),
    (
        "regularization_mode=4",
        ExactnessError,
        Attempt(T, ADAGRAD | COWCLIP, [table()], "row_wise"),
    ),
    ("32-bit floats", SetupError, Attempt(T, SGD, [table(data_type=DataType.FP16)], "row_wise")),
    (
        "output_dtype fp16",
        ExactnessError,
        Attempt(T, SGD | {"output_dtype": SparseType.FP16}, [table()], "row_wise"),
    ),
    ("tiers of table x", SetupError, Attempt({"x": RowTiers()}, SGD, [table()], "row_wise")),
    ("have row 9", SetupError, Attempt({"t": RowTiers([], [9])}, SGD, [table()], "row_wise")),
]


def test_what_is_refused() -> None:
    (errors,) = run_on_ranks(cases.refusals, 1, [attempt for _, _, attempt in REFUSED])
    for (message, kind, _), error in zip(REFUSED, errors, strict=True):
        assert isinstance(error, kind), message
        assert message in str(error)


def test_rows_of_a_deduplicated_batch_are_all_there() -> None:
    ((deduplicated, plain),) = run_on_ranks(cases.of_a_deduplicated_batch, 1)
    assert deduplicated.keys() == plain.keys()
    for name, rows in plain.items():
        torch.testing.assert_close(deduplicated[name], rows, atol=0, rtol=0)


def test_refused_calls() -> None:
    ((half, dtensors),) = run_on_ranks(cases.refused_calls, 1)
    assert isinstance(half, ExactnessError)
    assert "call compute_and_output_dist" in str(half)
    assert isinstance(dtensors, SetupError)
    assert "without DTensors" in str(dtensors)


def test_an_option_that_comes_later_is_refused() -> None:
    (error,) = run_on_ranks(cases.weight_decay_later, 1)
    assert isinstance(error, ExactnessError)
    assert "weight_decay=0.1" in str(error)


def test_uneven_nodes_are_refused() -> None:
    with pytest.raises(SetupError, match="nodes of 1, 2 ranks"):
        launch(cases.groups_of_uneven_nodes, 2)


def test_groups_end_with_their_process_group(tmp_path: Path) -> None:
    ranks = launch(cases.groups_of_another_process_group, 2, tmp_path / "store")
    assert ranks == [(True, True)] * 2
