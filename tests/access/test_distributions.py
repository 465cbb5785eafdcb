"""Profiles made from distributions and from histograms of reuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recd_plugins.interfaces.distributions import (
    exponential,
    from_reuse_histogram,
    from_weights,
    half_normal,
    read_reuse_histograms,
    zipf,
)
from recd_plugins.runtime.errors import DataError


@pytest.mark.parametrize(
    ("exponent", "length", "covered"),
    [
        (0.8, 50, {2122: 0.24999, 13279: 0.38702, 341275: 0.79505}),
        (1.2, 5, {220: 0.73771, 2979: 0.86844, 6532: 0.89625}),
    ],
)
def test_capped_zipf_has_the_coverage_of_the_reference_cases(
    exponent: float, length: float, covered: dict[int, float]
) -> None:
    access = zipf("t", 10**6, length, exponent, cap=1.0)
    assert access.length == pytest.approx(length)
    for rows, share in covered.items():
        assert access.covered(rows) == pytest.approx(share, abs=1e-5)


def test_forms() -> None:
    shifted = zipf("t", 100, 3.0, 1.1, shift=20.0).accesses
    falling = exponential("t", 100, 3.0, 10.0).accesses
    bell = half_normal("t", 100, 3.0, 10.0).accesses
    for k in (0, 7, 99):
        assert shifted[k] / shifted[0] == pytest.approx(((k + 21) / 21) ** -1.1)
        assert falling[k] / falling[0] == pytest.approx(np.exp(-k / 10))
        assert bell[k] / bell[0] == pytest.approx(np.exp(-((k / 10) ** 2) / 2))
    assert [a.sum() for a in (shifted, falling, bell)] == pytest.approx([3.0] * 3)


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20),
    st.floats(0.1, 5.0),
    st.floats(0.01, 0.999),
)
def test_under_a_cap_the_sum_stays(values: list[float], cap: float, part: float) -> None:
    weights = np.sort(values)[::-1]
    length = part * cap * len(weights)
    accesses = from_weights("t", weights, length, cap=cap).accesses
    assert accesses.sum() == pytest.approx(length)
    assert accesses.max() <= cap * (1 + 1e-9)
    assert (np.diff(accesses) <= 1e-12).all()
    below = accesses < cap * (1 - 1e-9)
    ratios = accesses[below] / weights[below]
    np.testing.assert_allclose(ratios, ratios[:1].repeat(len(ratios)), rtol=1e-6)


def test_more_accesses_than_a_cap_allows() -> None:
    with pytest.raises(DataError, match="4 rows that are read at most 1 times"):
        from_weights("t", np.ones(4), 4.1, cap=1.0)


def test_rows_are_in_order_or_shuffled() -> None:
    assert zipf("t", 1000, 5, 1).rows.tolist() == list(range(1000))
    shuffled = zipf("t", 1000, 5, 1, seed=3).rows
    assert sorted(shuffled) == list(range(1000))
    assert shuffled.tolist() != list(range(1000))
    np.testing.assert_array_equal(shuffled, zipf("t", 1000, 5, 1, seed=3).rows)


TEXT = """trace.pt
Locality stats after processing 1 batches of size 100
Avg # of indices: 38000
Avg # of unique cols: 20000
Histogram of col sizes:
(0, 1]: 0.500
(1, 2]: 0.300
(2, 8]: 0.200
(8+: 0.000
[0, 1, 2, 8]
Ratio of index distribution at different column sizes:
(0, 1]: 0.263
(1, 2]: 0.316
(2, 8]: 0.419
(8+: 0.002
[0, 1, 2, 8]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "reuse.txt").write_text(TEXT + "\n" + TEXT.replace("trace", "other"))
    return tmp_path / "reuse.txt"


def test_a_histogram_of_reuse(path: Path) -> None:
    histogram = read_reuse_histograms(str(path))["trace.pt"]
    sizes = (histogram.batch_size, histogram.accesses, histogram.unique_rows)
    assert sizes == (100, 38_000, 20_000)
    assert histogram.upper.tolist() == [1, 2, 8, 16]
    access = from_reuse_histogram("t", histogram)
    assert access.length == pytest.approx(380)
    assert (np.diff(access.accesses) <= 0).all()
    assert len(access.rows) == 20_000
    # 76 accesses of rows that are read 8 to 16 times, whose share of rows is no 0.
    reads = access.accesses * 100
    assert 12 < reads[0] < 16
    assert 5 <= (reads > 8.5).sum() <= 8
    assert reads[(reads > 2.01) & (reads <= 8)].sum() == pytest.approx(0.419 * 38_000, rel=0.03)
    assert (reads < 1.01).mean() == pytest.approx(0.5, abs=0.01)


def test_a_bin_without_a_share_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "reuse.txt").write_text(
        TEXT.replace("(2, 8]: 0.", "(2, 3]: 0.000\n(3, 8]: 0.").replace("(8+: 0.002", "(8+: 0.000")
    )
    access = from_reuse_histogram("t", read_reuse_histograms(tmp_path / "reuse.txt")["trace.pt"])
    assert len(access.rows) == 20_000
    assert access.length == pytest.approx(380)
    assert (np.diff(access.accesses) <= 0).all()


def test_its_shape_stays_at_another_size(path: Path) -> None:
    histogram = read_reuse_histograms(path)["other.pt"]
    whole = from_reuse_histogram("t", histogram)
    half = from_reuse_histogram("t", histogram, read_rows=10_000, num_embeddings=15_000)
    assert (half.num_embeddings, half.tail_rows, half.tail_probability) == (15_000, 5_000, 0.0)
    assert half.length == pytest.approx(190)
    np.testing.assert_allclose(half.accesses, whole.accesses.reshape(10_000, 2).mean(1))
    assert from_reuse_histogram("t", histogram, length=3.0).length == pytest.approx(3)
    with pytest.raises(DataError, match="it has 15,000 rows, and 20,000 are read"):
        from_reuse_histogram("t", histogram, num_embeddings=15_000)


@pytest.mark.parametrize("part", ["(1, 2]: 0.300\n", TEXT])
def test_another_format_is_refused(tmp_path: Path, part: str) -> None:
    (tmp_path / "reuse.txt").write_text(TEXT.replace(part, ""))
    with pytest.raises(DataError, match="no histogram of reuse"):
        read_reuse_histograms(tmp_path / "reuse.txt")
