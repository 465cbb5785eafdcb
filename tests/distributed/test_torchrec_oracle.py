"""TorchRec's own numerical check passes wherever the stock sharders pass it, and beyond."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from tests.distributed.oracle_cases import OracleCase, check
from torchrec.modules.embedding_configs import PoolingType

from recd_plugins.runtime.launch import RankError

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
SHARDED = ["table_wise", "row_wise", "column_wise"]

PASS_STOCK = [
    *(OracleCase(True, kind) for kind in SHARDED),
    *(
        OracleCase(False, kind, pooling=p)
        for kind in [*SHARDED, "data_parallel"]
        for p in (SUM, MEAN)
    ),
    *(
        OracleCase(False, kind, variable_batch_per_feature=True, pooling=p)
        for kind in ("table_wise", "column_wise")
        for p in (SUM, MEAN)
    ),
    *(
        OracleCase(False, kind, variable_batch_size=True)
        for kind in ("table_wise", "column_wise", "data_parallel")
    ),
]
FAIL_STOCK = {
    OracleCase(True, "data_parallel"): "split_with_sizes expects",
    OracleCase(False, "row_wise", variable_batch_per_feature=True): "invalid tensor size",
    OracleCase(
        False, "row_wise", variable_batch_per_feature=True, pooling=MEAN
    ): "invalid tensor size",
    OracleCase(False, "row_wise", variable_batch_size=True): "invalid tensor size",
}


@pytest.mark.parametrize("case", [*PASS_STOCK, *FAIL_STOCK], ids=str)
def test_what_stock_sharders_pass_and_fail(case: OracleCase) -> None:
    fails = case in FAIL_STOCK
    with pytest.raises(RankError, match=FAIL_STOCK[case]) if fails else nullcontext():
        check(case, stock=True)
    check(case, stock=False)
