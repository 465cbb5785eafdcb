from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recd_plugins.planning.study import GRANULE, largest_batch
from recd_plugins.runtime.errors import NoPlanError


@given(
    most=st.integers(7 * GRANULE, 10**6), start=st.integers(1, 10**6), together=st.integers(1, 7)
)
def test_it_fits_and_a_step_more_does_not(most: int, start: int, together: int) -> None:
    asked: dict[int, bool] = {}

    def fits(batch_size: int) -> bool:
        asked[batch_size] = batch_size <= most
        return asked[batch_size]

    found, step = largest_batch(fits, start=start, together=together)
    assert not any(batch_size % together for batch_size in asked)
    assert asked[found]
    assert not asked[found + step]
    assert step <= max(GRANULE * together, found / 64)
    assert len(asked) <= 40


def test_nothing_fits() -> None:
    with pytest.raises(NoPlanError, match="not even for batches of 64 rows"):
        largest_batch(lambda _: False, start=512)


def test_no_batch_has_more_rows_than_fbgemm_counts() -> None:
    asked: list[int] = []

    def fits(batch_size: int) -> bool:
        asked.append(batch_size)
        return True

    found, step = largest_batch(fits, start=512)
    assert max(asked) == found < 2**31 == found + step
