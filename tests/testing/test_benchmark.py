"""Parts for benchmarks: what is no number is never a figure, nor hidden behind one."""

from __future__ import annotations

import math

import pytest

from recd_plugins.testing.benchmark import Figure, largest

NAN = math.nan


@pytest.mark.parametrize("values", [[NAN, 1.0], [1.0, NAN], [0.0, NAN, math.inf], [NAN]])
def test_nan_is_the_largest(values: list[float]) -> None:
    assert math.isnan(largest(values))


def test_the_largest_of_numbers() -> None:
    assert largest(each for each in (0.5, math.inf, -2.0)) == math.inf
    assert largest([0.5, -2.0]) == 0.5


@pytest.mark.parametrize("samples", [[1.0, NAN, 2.0], [NAN, 1.0, 2.0], [1.0, 2.0, 3.0, math.inf]])
def test_a_sample_that_is_no_number_is_refused(samples: list[float]) -> None:
    """The median, least and largest of these may be numbers."""
    with pytest.raises(ValueError, match=r"speed: a sample is (nan|inf); expected finite numbers"):
        Figure.of("speed", samples, unit="ratio", better="higher")
