"""Test suite for preprocessing plugins, which transform ids and numbers."""

from __future__ import annotations

import pickle
from copy import deepcopy
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from recd_plugins.interfaces import Preprocessing
from recd_plugins.runtime.errors import RecdError
from recd_plugins.testing.contracts.plugin import PluginContract, check_identity

Rows = list[list[Any]]  # of int or of float
_DTYPES = {"ids": torch.int64, "numbers": torch.float32}


class PreprocessingContract(PluginContract):
    """Test suite for a preprocessing plugin. Subclasses override the fixture ``plugin``.

    The tests use ids, numbers or both, depending on the plugin's attribute ``takes``. If the plugin
    has a method ``fit``, the tests fit it to their rows first.
    """

    #: The largest id that the plugin accepts.
    max_id: ClassVar[int] = 2**63 - 1

    @pytest.fixture(autouse=True)
    def _fitted(self, plugin: Preprocessing, request: pytest.FixtureRequest) -> None:
        if _has_fit(plugin):
            asked = "rows" in request.fixturenames
            rows = request.getfixturevalue("rows") if asked else self._rows_of(plugin.takes[0])
            _fit(plugin, rows)

    @pytest.fixture(params=["ids", "numbers"])
    def rows(self, plugin: Preprocessing, request: pytest.FixtureRequest) -> Rows:
        """Return test rows, some of them equal. Rows of ids have different lengths, including 0."""
        if request.param not in plugin.takes:
            pytest.skip(f"{plugin.name} takes no {request.param}")
        return self._rows_of(request.param)

    def _rows_of(self, kind: str) -> Rows:
        if kind == "numbers":
            return [[n] for n in (0.25, 1.0, 0.0, 0.25, -3.5, 2.0, 1e9, 1.0, 0.75)]
        generator = torch.Generator().manual_seed(0)
        ids = [int(i) for i in torch.randint(0, self.max_id, (30,), generator=generator)]
        first, second, third = ids[:5], ids[5:6], ids[6:26]
        edges = [0, self.max_id, 0]
        return [first, [], second, first, first, edges, third, [], second, first[::-1]]

    def test_takes_ids_or_numbers(self, plugin: Preprocessing) -> None:
        assert plugin.takes, "takes is empty: no feature is left for the plugin"
        assert set(plugin.takes) <= {"ids", "numbers"}
        assert plugin.scope in ("id", "row")

    def test_transform_returns_rows(self, plugin: Preprocessing, rows: Rows) -> None:
        values, offsets = _jagged(rows)
        for given in (offsets, offsets.int()):
            result = plugin.transform(values, given)
            assert isinstance(result, tuple)
            assert len(result) == 2, "transform returns (values, offsets)"
            _check_form(*result, len(rows), values.dtype)
        if values.dtype == torch.int64:
            end = 2**63 if plugin.num_ids is None else plugin.num_ids
            wrong = [value for value in result[0].tolist() if not 0 <= value < end]
            assert not wrong, f"{plugin.name} gives {wrong[0]}; ids are in [0, num_ids)"

    @pytest.mark.parametrize("num_rows", [0, 1, 3])
    def test_takes_empty_input(self, plugin: Preprocessing, num_rows: int) -> None:
        for kind in plugin.takes:
            if _has_fit(plugin):
                plugin = _fit(type(plugin)(plugin.options), self._rows_of(kind))
            values = torch.zeros(0, dtype=_DTYPES[kind])
            offsets = torch.zeros(num_rows + 1, dtype=torch.int64)
            new_values, new_offsets = plugin.transform(values, offsets)
            assert (new_values.shape, new_values.dtype) == ((0,), values.dtype)
            assert new_offsets.tolist() == offsets.tolist()

    def test_numbers_have_a_width_and_64_bits(self, plugin: Preprocessing) -> None:
        if "numbers" not in plugin.takes:
            return
        if _has_fit(plugin):
            plugin = _fit(type(plugin)(plugin.options), self._rows_of("numbers"))
        values, offsets = _jagged([[0.5], [1.0], [2.0]])
        result, ends = plugin.transform(values.double(), offsets)
        assert result.dtype in (torch.float32, torch.float64), "numbers stay numbers"
        assert ends.diff().tolist() == [plugin.width] * 3, "width is not the numbers per row"

    def test_a_row_depends_on_itself_alone(self, plugin: Preprocessing, rows: Rows) -> None:
        """The result for a row must not depend on other rows: only unique rows are transformed."""
        for row, result in zip(rows, _apply(plugin, rows), strict=True):
            assert _apply(plugin, [row]) == [result]

    def test_scope_id_looks_at_nothing_but_an_id(self, plugin: Preprocessing, rows: Rows) -> None:
        """With scope ``id``, the result for an id must not depend on the other ids of its row."""
        if plugin.scope != "id":
            return
        for row, result in zip(rows, _apply(plugin, rows), strict=True):
            alone = [_apply(plugin, [[value]]) for value in row]
            assert [[[value]] for value in result] == alone, (
                f"values of {row} are transformed differently alone: set scope to row"
            )

    def test_kept_lengths_are_those_of_rows_cut_at_their_end(
        self, plugin: Preprocessing, rows: Rows
    ) -> None:
        kept = plugin.kept_lengths(torch.tensor([len(row) for row in rows]))
        if kept is not None:
            cut = [row[:length] for row, length in zip(rows, kept.tolist(), strict=True)]
            assert _apply(plugin, rows) == cut, "kept_lengths is for transforms that only cut rows"

    def test_transform_keeps_no_state(self, plugin: Preprocessing, rows: Rows) -> None:
        """``transform`` must not keep state: reader processes use copies of the plugin."""
        batches = [rows[start : start + 3] for start in range(0, len(rows), 3)]
        one, other = (pickle.loads(pickle.dumps(plugin)) for _ in range(2))
        forwards = [deepcopy(one.transform(*_jagged(batch))) for batch in batches]
        backwards = [deepcopy(other.transform(*_jagged(batch))) for batch in reversed(batches)]
        for batch, result, again in zip(batches, forwards, reversed(backwards), strict=True):
            assert _bits(result) == _bits(again), (
                f"{plugin.name} keeps state between calls of transform: {batch} becomes "
                f"{_rows(*result)} or {_rows(*again)}. No checkpoint keeps that state: learn it in "
                "fit, and return it by fitted_state and identity"
            )

    def test_leaves_tensors_alone(self, plugin: Preprocessing, rows: Rows) -> None:
        values, offsets = given = _jagged(rows)
        before = deepcopy(given)
        result = plugin.transform(values, offsets)
        torch.testing.assert_close(given, before, rtol=0, atol=0, msg="transform changed its input")
        returned = _bits(result)
        for later in (rows[::-1], rows[:3]):
            plugin.transform(*_jagged(later))
        assert _bits(result) == returned, "transform overwrote tensors it returned before"

    def test_identity_is_of_what_it_transforms_by(self, plugin: Preprocessing) -> None:
        check_identity(plugin)

    def test_nothing_is_fitted_before_fit(self, plugin: Preprocessing) -> None:
        made = type(plugin)(plugin.options)
        assert made.fitted is None, "rename the attribute fitted: the framework sets it"
        assert made.num_ids == plugin.num_ids, "num_ids is asked before fit: derive it from options"

    @pytest.mark.parametrize("size", [1, 4, 100])
    def test_fit_takes_rows_in_pieces_of_any_size(
        self, plugin: Preprocessing, rows: Rows, size: int
    ) -> None:
        if not _has_fit(plugin):
            return
        again = _fit(type(plugin)(plugin.options), rows, size)
        if size == 4:  # as the fixture did
            assert again.identity() == plugin.identity()
        torch.testing.assert_close(
            again.transform(*_jagged(rows)),
            plugin.transform(*_jagged(rows)),
            msg=lambda text: f"{plugin.name} depends on the number of rows per piece: {text}",
        )

    def test_fit_looks_at_rows_and_leaves_them(self, plugin: Preprocessing, rows: Rows) -> None:
        if not _has_fit(plugin):
            return
        assert plugin.fit_rows is None or plugin.fit_rows > 0, "fit_rows leaves fit without rows"
        given, before = _jagged(rows), _jagged(rows)
        type(plugin)(plugin.options).fit("feature", iter([given]))
        torch.testing.assert_close(given, before, rtol=0, atol=0)

    def test_a_state_stands_for_fitting(self, plugin: Preprocessing, rows: Rows) -> None:
        """A plugin that loads a saved state must transform rows like the fitted plugin."""
        if type(plugin).fitted_state is Preprocessing.fitted_state:
            return
        assert _has_fit(plugin), "fitted_state without fit is never kept in a checkpoint"
        before = {name: tensor.clone() for name, tensor in plugin.fitted_state().items()}
        again = type(plugin)(plugin.options)
        again.load_fitted_state(before)
        assert again.identity() == plugin.identity()
        assert _apply(again, rows) == _apply(plugin, rows)
        torch.testing.assert_close(dict(again.fitted_state()), before, rtol=0, atol=0)

    def test_identity_tells_what_was_fitted(self, plugin: Preprocessing, rows: Rows) -> None:
        if not _has_fit(plugin):
            return
        assert plugin.identity(), "a plugin with fit returns a digest of what it decided"
        try:
            other = _fit(type(plugin)(plugin.options), rows[:1])
        except RecdError:
            return  # of one row alone it decides nothing
        if _apply(other, rows) != _apply(plugin, rows):
            assert other.identity() != plugin.identity(), "two fits transform differently"


def _has_fit(plugin: Preprocessing) -> bool:
    return type(plugin).fit is not Preprocessing.fit


def _fit(plugin: Preprocessing, rows: Rows, size: int = 4) -> Preprocessing:
    """Fit the plugin to an iterator of chunks with ``size`` rows. The last chunk is empty."""
    parts = [_jagged(rows[start : start + size]) for start in range(0, len(rows), size)]
    values, offsets = parts[0]
    plugin.fit("feature", iter([*parts, (values[:0], offsets[:1])]))
    return plugin


def _jagged(rows: Rows) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    values = [value for row in rows for value in row]
    is_number = any(isinstance(value, float) for value in values)
    return torch.tensor(values, dtype=torch.float32 if is_number else torch.int64), offsets


def _rows(values: Tensor, offsets: Tensor) -> Rows:
    return [values[start:end].tolist() for start, end in pairwise(offsets.tolist())]


def _bits(result: tuple[Tensor, Tensor]) -> tuple[bytes, list[int]]:
    """Return the bytes of the values, and the offsets, so that NaN values compare equal, too."""
    values, offsets = result
    return values.numpy().tobytes(), offsets.tolist()


def _apply(plugin: Preprocessing, rows: Rows) -> Rows:
    return _rows(*plugin.transform(*_jagged(rows)))


def _check_form(values: Tensor, offsets: Tensor, num_rows: int, dtype: torch.dtype) -> None:
    assert isinstance(values, Tensor)
    assert isinstance(offsets, Tensor)
    assert values.dtype == dtype, "ids stay int64, numbers float32"
    assert values.dim() == 1
    assert offsets.dtype in (torch.int32, torch.int64)
    assert offsets.shape == (num_rows + 1,), "the number of rows changed"
    assert offsets[0] == 0
    assert offsets[-1] == values.numel(), "offsets end where values end"
    assert bool((offsets.diff() >= 0).all()), "offsets never fall"
