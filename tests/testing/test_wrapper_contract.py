"""The contract of datasets refuses a wrapper that has other rows than what it wraps, by the row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa
import pytest
from tests.data.number_rows import Numbers

from recd_plugins.interfaces import (
    Dataset,
    DatasetWrapper,
    Lookups,
    Origin,
    PluginOptions,
    Reader,
    Rows,
)
from recd_plugins.testing.contracts import DatasetContract

Batches = list[Rows]


class Listed(Reader):
    def __init__(self, batches: Batches) -> None:
        self._batches, self._next = batches, 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Rows]:
        while self._next < len(self._batches):
            self._next += 1
            yield self._batches[self._next - 1]
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class Changed(DatasetWrapper):
    name = "test.changed"
    change: Callable[[Batches], Batches]

    def reader(self, **arguments: Any) -> Reader:
        return Listed(self.change(list(self.inner.reader(**arguments))))


def content(batches: Batches) -> Batches:
    return [
        replace(rows, data=rows.data.take(pa.array([0, 0, 2, 3]))) if len(rows) > 1 else rows
        for rows in batches
    ]


def in_place(batches: Batches) -> Batches:
    return [
        replace(rows, origins=(of.slice(0, 1), of.slice(0, 1), of.slice(2, 2)))
        if len(rows) > 1
        else rows
        for rows in content(batches)
        for of in rows.origins
    ]


def made_up(batches: Batches) -> Batches:
    extra = replace(batches[0], origins=(Origin("mine", 0, len(batches[0])),))
    return [*batches, extra]


def lost_in_batches(batches: Batches) -> Batches:
    return batches[1:] if len(batches[0]) > 1 else batches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batches: [*batches, batches[0]], "numbers.log: row 0 (from 0) came twice"),
        (lambda batches: [*batches[:-1], batches[0]], "numbers.log: row 0 (from 0) came twice"),
        (in_place, "numbers.log: row 0 (from 0) came twice"),
        (content, "numbers.log: row 1 (from 0) differs from the row of its origin"),
        (made_up, "mine: row 0 (from 0) is no row of the data"),
        (lambda batches: batches[1:], "lost in batches of 1, as numbers.log: row 0 (from 0)"),
        (lost_in_batches, "4 rows of the inner dataset are lost in batches of 4, as numbers.log:"),
    ],
)
def test_it_names_the_row(change: Callable[[Batches], Batches], message: str) -> None:
    with pytest.raises(AssertionError) as caught:
        DatasetContract().test_a_wrapper_keeps_each_row(wrapper(change))
    assert message in str(caught.value)


def test_another_order_is_none() -> None:
    DatasetContract().test_a_wrapper_keeps_each_row(wrapper(lambda batches: batches[::-1]))


def wrapper(change: Callable[[Batches], Batches]) -> Dataset:
    options = PluginOptions()
    wrapped = Changed(options).over(Numbers(Numbers.Options(shuffle=False)), cast("Lookups", None))
    vars(wrapped)["change"] = change
    return wrapped
