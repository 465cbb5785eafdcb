"""The contract of preprocessing."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from recd_plugins.interfaces import Preprocessing
from recd_plugins.testing.contracts.plugin import PluginContract

Rows = list[list[int]]


class PreprocessingContract(PluginContract):
    """Tests of a preprocessing plugin: override the fixture ``plugin``."""

    #: The largest id that the plugin takes.
    max_id: ClassVar[int] = 2**63 - 1

    @pytest.fixture
    def rows(self) -> Rows:
        """Ids by row, with equal rows, empty rows, a long row, and repeats inside a row."""
        generator = torch.Generator().manual_seed(0)
        ids = [int(i) for i in torch.randint(0, self.max_id, (30,), generator=generator)]
        first, second, third = ids[:5], ids[5:6], ids[6:26]
        edges = [0, self.max_id, 0]
        return [first, [], second, first, first, edges, third, [], second, first[::-1]]

    def test_keeps_the_number_of_rows(self, plugin: Preprocessing, rows: Rows) -> None:
        values, offsets = plugin.transform(*_jagged(rows))
        _check_form(values, offsets, len(rows))

    def test_equal_rows_give_equal_rows(self, plugin: Preprocessing, rows: Rows) -> None:
        results = _apply(plugin, rows)
        for row, result in zip(rows, results, strict=True):
            assert result == results[rows.index(row)], f"{row} was transformed in two ways"

    def test_a_row_depends_on_itself_alone(self, plugin: Preprocessing, rows: Rows) -> None:
        """Which rows are left after deduplication must not matter."""
        for row, result in zip(rows, _apply(plugin, rows), strict=True):
            assert _apply(plugin, [row]) == [result]

    def test_gives_the_same_twice(self, plugin: Preprocessing, rows: Rows) -> None:
        assert _apply(plugin, rows) == _apply(plugin, rows)

    def test_leaves_its_input_as_it_is(self, plugin: Preprocessing, rows: Rows) -> None:
        values, offsets = _jagged(rows)
        values_before, offsets_before = values.clone(), offsets.clone()
        plugin.transform(values, offsets)
        torch.testing.assert_close(values, values_before, rtol=0, atol=0)
        torch.testing.assert_close(offsets, offsets_before, rtol=0, atol=0)

    @pytest.mark.parametrize("rows", [[], [[]], [[], [], []]], ids=["no rows", "one", "three"])
    def test_takes_empty_input(self, plugin: Preprocessing, rows: Rows) -> None:
        values, offsets = plugin.transform(*_jagged(rows))
        _check_form(values, offsets, len(rows))

    def test_takes_int32_offsets(self, plugin: Preprocessing, rows: Rows) -> None:
        values, offsets = _jagged(rows)
        new_values, new_offsets = plugin.transform(values, offsets.int())
        _check_form(new_values, new_offsets, len(rows))
        assert _rows(new_values, new_offsets) == _apply(plugin, rows)


def _jagged(rows: Rows) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return torch.tensor([i for row in rows for i in row], dtype=torch.int64), offsets


def _rows(values: Tensor, offsets: Tensor) -> Rows:
    bounds = offsets.tolist()
    return [values[start:end].tolist() for start, end in pairwise(bounds)]


def _apply(plugin: Preprocessing, rows: Rows) -> Rows:
    return _rows(*plugin.transform(*_jagged(rows)))


def _check_form(values: Tensor, offsets: Tensor, num_rows: int) -> None:
    assert values.dtype == torch.int64, "ids are int64"
    assert values.dim() == 1
    assert offsets.dtype in (torch.int32, torch.int64)
    assert offsets.shape == (num_rows + 1,), "the number of rows changed"
    assert offsets[0] == 0
    assert offsets[-1] == values.numel(), "offsets end where values end"
    assert bool((offsets.diff() >= 0).all()), "offsets never fall"
