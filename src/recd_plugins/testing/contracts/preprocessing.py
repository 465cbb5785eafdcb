"""The contract of preprocessing."""

from __future__ import annotations

import pickle
from copy import deepcopy
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from recd_plugins.errors import RecdError
from recd_plugins.interfaces import Preprocessing
from recd_plugins.testing.contracts.plugin import PluginContract, check_identity

Rows = list[list[Any]]  # of int or of float


class PreprocessingContract(PluginContract):
    """Tests of a preprocessing plugin: override the fixture ``plugin``.

    They run on ids, on numbers or on both, as the plugin's ``takes`` says. A plugin with ``fit`` is
    fitted first, to what the test is about.
    """

    #: The largest id that the plugin takes.
    max_id: ClassVar[int] = 2**63 - 1

    @pytest.fixture(autouse=True)
    def _fitted(self, plugin: Preprocessing, request: pytest.FixtureRequest) -> None:
        if _has_fit(plugin):
            asked = "rows" in request.fixturenames
            rows = request.getfixturevalue("rows") if asked else self._rows_of(plugin.takes[0])
            _fit(plugin, rows)

    @pytest.fixture(params=["ids", "numbers"])
    def rows(self, plugin: Preprocessing, request: pytest.FixtureRequest) -> Rows:
        """Rows with equal ones among them; of ids empty and long ones too, with repeats."""
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

    def test_keeps_the_number_of_rows(self, plugin: Preprocessing, rows: Rows) -> None:
        _check_form(plugin.transform(*_jagged(rows)), rows)

    def test_ids_are_rows_of_a_table(self, plugin: Preprocessing, rows: Rows) -> None:
        """Of one that has ``num_ids`` rows, where that is known."""
        values, _ = plugin.transform(*_jagged(rows))
        if values.dtype.is_floating_point:
            return
        end = 2**63 if plugin.num_ids is None else plugin.num_ids
        wrong = [value for value in values.tolist() if not 0 <= value < end]
        assert not wrong, f"{plugin.name} gives {wrong[0]}; ids are 0 or more, and below num_ids"

    def test_num_ids_is_known_before_fit(self, plugin: Preprocessing) -> None:
        """A table with fewer rows is refused before a run begins."""
        made = type(plugin)(plugin.options).num_ids
        assert made == plugin.num_ids, "fit changes num_ids: let options say it, or leave it out"

    def test_equal_rows_give_equal_rows(self, plugin: Preprocessing, rows: Rows) -> None:
        results = _apply(plugin, rows)
        for row, result in zip(rows, results, strict=True):
            assert result == results[rows.index(row)], f"{row} was transformed in two ways"

    def test_a_row_depends_on_itself_alone(self, plugin: Preprocessing, rows: Rows) -> None:
        """Which rows are left after deduplication must not matter."""
        for row, result in zip(rows, _apply(plugin, rows), strict=True):
            assert _apply(plugin, [row]) == [result]

    def test_scope_id_looks_at_nothing_but_an_id(self, plugin: Preprocessing, rows: Rows) -> None:
        """Rows then share ids, and each is transformed once, whatever rows it is in."""
        if plugin.scope != "id":
            return
        for row, result in zip(rows, _apply(plugin, rows), strict=True):
            alone = [_apply(plugin, [[value]]) for value in row]
            assert [[[value]] for value in result] == alone, (
                f"values of {row} do not become what each becomes alone; the scope is row"
            )

    def test_kept_lengths_are_those_of_rows_cut_at_their_end(
        self, plugin: Preprocessing, rows: Rows
    ) -> None:
        kept = plugin.kept_lengths(torch.tensor([len(row) for row in rows]))
        if kept is None:
            return
        cut = [row[:length] for row, length in zip(rows, kept.tolist(), strict=True)]
        assert _apply(plugin, rows) == cut, "kept_lengths is for transforms that only cut rows"

    def test_a_number_becomes_as_many_as_width_says(self, plugin: Preprocessing) -> None:
        if "numbers" not in plugin.takes:
            return
        if _has_fit(plugin):
            plugin = _fit(type(plugin)(plugin.options), self._rows_of("numbers"))
        results = _apply(plugin, [[0.5], [1.0], [2.0]])
        assert [len(result) for result in results] == [plugin.width] * 3

    def test_takes_numbers_of_64_bits(self, plugin: Preprocessing) -> None:
        """Columns of float64 and of large integers are rounded to float32 after all steps."""
        if "numbers" not in plugin.takes:
            return
        if _has_fit(plugin):
            plugin = _fit(type(plugin)(plugin.options), self._rows_of("numbers"))
        values, offsets = _jagged([[0.5], [1.0], [2.0]])
        result, _ = plugin.transform(values.double(), offsets)
        assert result.dtype in (torch.float32, torch.float64), "numbers stay numbers"

    def test_gives_the_same_twice(self, plugin: Preprocessing, rows: Rows) -> None:
        assert _apply(plugin, rows) == _apply(plugin, rows)

    def test_what_came_before_does_not_matter(self, plugin: Preprocessing, rows: Rows) -> None:
        """A run that goes on begins with a later batch, and each of several readers has some."""
        batches = [rows[start : start + 3] for start in range(0, len(rows), 3)]
        one, other = (pickle.loads(pickle.dumps(plugin)) for _ in range(2))
        # Copies: what is written into later is the subject of another test.
        forwards = [deepcopy(one.transform(*_jagged(batch))) for batch in batches]
        backwards = [deepcopy(other.transform(*_jagged(batch))) for batch in reversed(batches)]
        for batch, result, again in zip(batches, forwards, reversed(backwards), strict=True):
            assert _bits(result) == _bits(again), (
                f"{plugin.name} keeps state between calls of transform: {batch} becomes "
                f"{_rows(*result)} or {_rows(*again)}, as batches came before. No checkpoint keeps "
                "that state, so a run that goes on would silently train on other values. Let "
                "transform depend on options and on what fit decided alone: what is to be learned "
                "from data, as numbers of ids, fit learns, and fitted_state and identity tell"
            )

    def test_a_pickled_copy_gives_the_same(self, plugin: Preprocessing, rows: Rows) -> None:
        """Readers in other processes get one."""
        expected = _apply(plugin, rows)
        assert _apply(pickle.loads(pickle.dumps(plugin)), rows) == expected

    def test_identity_is_of_what_it_transforms_by(self, plugin: Preprocessing) -> None:
        """It tells a run that goes on from a checkpoint whether ids mean what they meant."""
        check_identity(plugin)

    def test_the_name_fitted_is_left_to_who_calls_fit(self, plugin: Preprocessing) -> None:
        made = type(plugin)(plugin.options)
        assert made.fitted is None, "take another name: it would not be fitted"

    def test_fit_comes_to_the_same(self, plugin: Preprocessing, rows: Rows) -> None:
        """Every rank fits, and a run that goes on fits again."""
        if not _has_fit(plugin):
            return
        again = _fit(type(plugin)(plugin.options), rows)
        assert again.identity() == plugin.identity()
        assert _apply(again, rows) == _apply(plugin, rows)

    @pytest.mark.parametrize("size", [1, 100])
    def test_fit_takes_rows_in_pieces_of_any_size(
        self, plugin: Preprocessing, rows: Rows, size: int
    ) -> None:
        """Sums of floats may be rounded otherwise; ids are the same."""
        if not _has_fit(plugin):
            return
        again = _fit(type(plugin)(plugin.options), rows, size)
        torch.testing.assert_close(
            again.transform(*_jagged(rows)),
            plugin.transform(*_jagged(rows)),
            msg=lambda difference: (
                f"{plugin.name} came to something else where fit was given {size} rows at a time; "
                f"how many come at a time says nothing: {difference}"
            ),
        )

    def test_a_state_stands_for_fitting(self, plugin: Preprocessing, rows: Rows) -> None:
        """Checkpoints keep it; a plugin without one is fitted anew."""
        if type(plugin).fitted_state is Preprocessing.fitted_state:
            return
        assert _has_fit(plugin), (
            f"{plugin.name} has fitted_state and no fit, so no checkpoint keeps it: decide it in "
            "fit, or say by identity what it reads"
        )
        before = {name: tensor.clone() for name, tensor in plugin.fitted_state().items()}
        again = type(plugin)(plugin.options)
        again.load_fitted_state(before)
        assert again.identity() == plugin.identity()
        assert _apply(again, rows) == _apply(plugin, rows)
        after = again.fitted_state()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())

    def test_identity_tells_what_was_fitted(self, plugin: Preprocessing, rows: Rows) -> None:
        if not _has_fit(plugin):
            return
        assert plugin.identity(), "a plugin with fit returns a digest of what it decided"
        try:
            other = _fit(type(plugin)(plugin.options), rows[:1])
        except RecdError:
            return  # of one row alone it decides nothing
        if _apply(other, rows) != _apply(plugin, rows):
            assert other.identity() != plugin.identity(), "it transforms otherwise, unnoticed"

    def test_fit_looks_at_rows_and_leaves_them(self, plugin: Preprocessing, rows: Rows) -> None:
        if not _has_fit(plugin):
            return
        assert plugin.fit_rows is None or plugin.fit_rows > 0, "fit_rows leaves fit without rows"
        values, offsets = _jagged(rows)
        values_before, offsets_before = values.clone(), offsets.clone()
        type(plugin)(plugin.options).fit("feature", iter([(values, offsets)]))
        torch.testing.assert_close(values, values_before, rtol=0, atol=0)
        torch.testing.assert_close(offsets, offsets_before, rtol=0, atol=0)

    def test_leaves_its_input_as_it_is(self, plugin: Preprocessing, rows: Rows) -> None:
        values, offsets = _jagged(rows)
        values_before, offsets_before = values.clone(), offsets.clone()
        plugin.transform(values, offsets)
        torch.testing.assert_close(values, values_before, rtol=0, atol=0)
        torch.testing.assert_close(offsets, offsets_before, rtol=0, atol=0)

    def test_leaves_what_it_returned_as_it_is(self, plugin: Preprocessing, rows: Rows) -> None:
        values, offsets = plugin.transform(*_jagged(rows))
        values_before, offsets_before = values.clone(), offsets.clone()
        for later in (rows[::-1], rows[:3]):
            plugin.transform(*_jagged(later))
        message = "transform wrote into what it returned before; return new tensors"
        torch.testing.assert_close(
            values, values_before, rtol=0, atol=0, equal_nan=True, msg=message
        )
        torch.testing.assert_close(offsets, offsets_before, rtol=0, atol=0, msg=message)

    @pytest.mark.parametrize("num_rows", [0, 1, 3])
    def test_takes_empty_input(self, plugin: Preprocessing, num_rows: int) -> None:
        dtypes = {"ids": torch.int64, "numbers": torch.float32}
        for kind in plugin.takes:
            if _has_fit(plugin):
                plugin = _fit(type(plugin)(plugin.options), self._rows_of(kind))
            values = torch.zeros(0, dtype=dtypes[kind])
            offsets = torch.zeros(num_rows + 1, dtype=torch.int64)
            new_values, new_offsets = plugin.transform(values, offsets)
            assert new_values.shape == (0,)
            assert new_values.dtype == values.dtype
            assert new_offsets.tolist() == offsets.tolist()

    def test_takes_int32_offsets(self, plugin: Preprocessing, rows: Rows) -> None:
        values, offsets = _jagged(rows)
        result = plugin.transform(values, offsets.int())
        _check_form(result, rows)
        assert _rows(*result) == _apply(plugin, rows)


def _has_fit(plugin: Preprocessing) -> bool:
    return type(plugin).fit is not Preprocessing.fit


def _fit(plugin: Preprocessing, rows: Rows, size: int = 4) -> Preprocessing:
    """The plugin, fitted to rows, ``size`` at a time and once none."""
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
    bounds = offsets.tolist()
    return [values[start:end].tolist() for start, end in pairwise(bounds)]


def _bits(result: tuple[Tensor, Tensor]) -> tuple[bytes, list[int]]:
    """What two results have in common that are the same bit for bit; NaN is then itself."""
    values, offsets = result
    return values.numpy().tobytes(), offsets.tolist()


def _apply(plugin: Preprocessing, rows: Rows) -> Rows:
    return _rows(*plugin.transform(*_jagged(rows)))


def _check_form(result: tuple[Tensor, Tensor], rows: Rows) -> None:
    values, offsets = result
    assert values.dtype == _jagged(rows)[0].dtype, "ids stay int64, numbers float32"
    assert values.dim() == 1
    assert offsets.dtype in (torch.int32, torch.int64)
    assert offsets.shape == (len(rows) + 1,), "the number of rows changed"
    assert offsets[0] == 0
    assert offsets[-1] == values.numel(), "offsets end where values end"
    assert bool((offsets.diff() >= 0).all()), "offsets never fall"
