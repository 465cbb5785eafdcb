"""Parts for benchmarks: what is no number is never a figure, nor hidden behind one."""

from __future__ import annotations

import math

import pytest
import torch

from recd_plugins.testing.benchmark import (
    Figure,
    in_turn,
    largest,
    one_thread,
    processor_seconds,
)

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


def test_processor_time_is_of_one_thread() -> None:
    """What others of torch compute would be in nobody's time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen: list[int] = []

        def look(_: None) -> None:
            seen.append(torch.get_num_threads())

        processor_seconds(look, None)
        in_turn(look, look, [None], turns=1)
        with one_thread():
            seen.append(torch.get_num_threads())
        assert seen == [1] * 6
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
