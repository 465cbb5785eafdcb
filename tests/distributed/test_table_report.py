from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.distributed import table_report_cases as cases
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)

from recd_plugins.sharding.table_report import (
    DENSE,
    ShardedTables,
    TableLine,
    _note_of_codecs,
)
from recd_plugins.testing.gloo import run_on_ranks

SGD = "exact_sgd, lr 0.25"
BAGS = "ExactShardedEmbeddingBagCollection bags"
PROCESSED = "ShardedFeatureProcessedEmbeddingBagCollection processed"
OWN = (
    "nobody: own is a OwnBags, a subclass of EmbeddingBagCollection, and "
    "DistributedModelParallel matches types exactly"
)


def test_every_rank_knows_who_shards_and_trains_every_table() -> None:
    ranks = run_on_ranks(cases.lines, 2)
    for lines, _ in ranks:
        assert lines == [
            TableLine("b0", 10, 4, "table_wise", "fused", SGD, BAGS),
            TableLine("b1", 20, 4, "row_wise", "fused", SGD, BAGS),
            TableLine("b2", 30, 4, "table_wise", "fused", SGD, BAGS),
            TableLine("copy", 40, 4, "data_parallel", "dense", DENSE, BAGS),
            TableLine(
                "s",
                50,
                8,
                "row_wise",
                "fused",
                "exact_row_wise_adagrad, lr 0.5",
                "ExactShardedEmbeddingCollection sequences",
            ),
            TableLine("t_a", 128, 4, "table_wise", "fused", SGD, PROCESSED),
            TableLine("t_b", 128, 4, "table_wise", "fused", SGD, PROCESSED),
            TableLine("t_a", 128, 4, "", "", DENSE, OWN),
            TableLine("t_b", 128, 4, "", "", DENSE, OWN),
        ]
    text = ranks[0][1].splitlines()
    assert [line.split("  ")[0] for line in text] == [
        "tables",
        "b0, b2",
        "b1",
        "copy",
        "s",
        "t_a, t_b",
        "t_a, t_b",
    ]
    row = ["b0,", "b2", "40", "4", "table_wise", "fused", *SGD.split(), *BAGS.split()]
    assert text[1].split() == row


def test_many_alike_tables_are_one_line() -> None:
    lines = [TableLine(f"t_{i}", 1000, 4, "row_wise", "fused", SGD, BAGS) for i in range(26)]
    _, line = str(ShardedTables(tuple(lines))).splitlines()
    assert line.startswith("t_0 ... t_25 (26 tables)  26,000    4  row_wise  fused ")


def test_tables_that_the_plan_forgot_are_told() -> None:
    (lines,) = run_on_ranks(cases.of_an_empty_plan, 1)
    assert {line.sharded_by for line in lines} == {"nobody: bags is not in the plan"}


def test_an_optimizer_that_nobody_chose_is_fbgemms() -> None:
    params = {"optimizer": EmbOptimType.EXACT_ADAGRAD}
    assert run_on_ranks(cases.with_params, 1, params) == [["exact_adagrad, lr 0.01"] * 2]


@pytest.mark.parametrize("backward", CommType)
def test_rounded_gradients_of_rows_that_are_stored_once_are_told(backward: CommType) -> None:
    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=backward)
    codecs = get_qcomm_codecs_registry(config, device=torch.device("cpu"))
    note = _note_of_codecs("bags", codecs)
    assert note.startswith("bags: gradients are sent in ") == (backward != CommType.FP32)
    assert ("in 16 bits" in note) == (backward in (CommType.FP16, CommType.BF16))
    assert str(ShardedTables((), (note,))).endswith(note)
