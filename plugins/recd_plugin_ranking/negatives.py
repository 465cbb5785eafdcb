"""``ranking.negatives``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from recd_plugin_ranking.drawn_items import DrawnItems
from recd_plugin_ranking.items import Items, kept
from recd_plugin_ranking.request_rows import RequestRows
from recd_plugins.api import (
    DataError,
    DatasetWrapper,
    PlannedReader,
    PluginOptions,
    Reader,
    Rows,
    SetupError,
    Split,
    digest,
)

#: From rows and the epoch to rows, several for each.
Expand = Callable[[Rows, int], Rows]


class Negatives(DatasetWrapper):
    """Each positive row of training, followed by rows with label 0: negatives drawn for it."""

    name = "ranking.negatives"

    class Options(PluginOptions):
        """Options of ``ranking.negatives``."""

        item: str = Field(description="Feature of the item, one id a row.")
        with_item: list[str] = Field(
            default=[],
            description="Other features of the item, sparse or dense: they are those of the first "
            "row of training that has the drawn item.",
        )
        negatives: PositiveInt = Field(default=4, description="Negatives of a positive row.")
        by: Literal["uniform", "popularity", "in_request"] = Field(
            default="uniform",
            description="Items of the training split, all alike or by their rows; or rows of the "
            "row's own session with label 0, whole, as the log has them.",
        )
        power: float = Field(
            default=1.0, ge=0, description="Of popularity: rows to the power of it are weights."
        )
        never: list[str] = Field(
            default=[],
            description="Features of the row that name items which are not drawn for it, as its "
            "history; its own item never is.",
        )
        seed: int = Field(default=0, ge=0, lt=1 << 63, description="Seed of the draws.")

        @model_validator(mode="after")
        def _suit_the_draw(self) -> Self:
            if self.by == "in_request" and (self.with_item or self.never):
                raise ValueError(
                    "in_request takes rows as they are: with_item and never are of other draws"
                )
            if self.by != "popularity" and self.power != 1:
                raise ValueError("power is of by: popularity; leave it out")
            return self

    options: Options

    @property
    def rows_together(self) -> int:
        """A row and its negatives."""
        return 1 + self.options.negatives

    def label_mean(self) -> float:
        """Return the share of positive rows among those of training."""
        return 1 / self.rows_together

    def prepare(self) -> None:
        """What the inner dataset does, and a look at its columns.

        Raises:
            SetupError: an option names no feature, or the dataset knows no sessions, or has an
                order that in_request does not keep.
        """
        super().prepare()
        options, schema = self.options, self.inner.schema()
        numbers = schema.dense if options.by != "in_request" else ()
        known = {
            "item": schema.sparse,
            "with_item": (*schema.sparse, *numbers),
            "never": schema.sparse,
        }
        for option, names in known.items():
            value = getattr(options, option)
            for name in [value] if isinstance(value, str) else value:
                if name not in names:
                    raise SetupError(
                        f"{self.name}: option {option} names {name}, which is no feature of "
                        f"{self.inner.name}; there are: {', '.join(names)}"
                    )
        if options.by == "in_request" and self.inner.session_keys() is None:
            raise SetupError(
                f"{self.name}: {self.inner.name} does not say which rows are of one session, which "
                "by: in_request draws from; take another draw"
            )
        if options.by == "in_request":
            self._check_order()

    def _check_order(self) -> None:
        """Refuse an order that in_request, which reads the rows of the log itself, does not keep.

        Raises:
            SetupError: the rows would come in another order than that of the log.
        """
        inner = self.inner
        if isinstance(inner, DatasetWrapper):
            raise SetupError(
                f"{self.name}: by: in_request takes rows in the order of the log, so {inner.name} "
                f"would do nothing; put it behind {self.name} in wrap, or leave it out"
            )
        reader = inner.reader(rank=0, world_size=1, batch_size=1, split="train")
        if isinstance(reader, PlannedReader) and reader.shuffles:
            raise SetupError(
                f"{self.name}: by: in_request takes rows in the order of the log, and "
                f"{inner.name} is to shuffle them in each epoch (shuffle: true, or order: "
                "shuffled), which would do nothing; leave that out, and store the log in an order "
                "that suits training"
            )

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        """Training with negatives; the test split as it is."""
        ranks = {"rank": rank, "world_size": world_size}
        if split != "train":
            return self.inner.reader(**ranks, batch_size=batch_size, split=split)
        together = self.rows_together
        if batch_size % together:
            below = max(together, batch_size - batch_size % together)
            raise DataError(
                f"{self.name} hands out a row and its {together - 1} negatives together, and a "
                f"batch of {batch_size} rows is no multiple of {together}: set "
                f"training.batch_size to {below}, say"
            )
        anchors = batch_size // together
        said = {"negatives": digest(self.options.model_dump(mode="json"))}
        if self.options.by != "in_request":
            inner = self.inner.reader(**ranks, batch_size=anchors, split=split)
            return NegativesReader(inner, self._drawn_items, said)
        rows = self._request_rows
        log = self.inner.reader(rank=0, world_size=1, batch_size=1, split=split).state_dict()
        data = {**said, "log": digest(log)}  # its state at the start says which rows these are
        return NegativesReader(rows.positives(**ranks, batch_size=anchors, data=data), rows, said)

    @cached_property
    def _drawn_items(self) -> DrawnItems:
        options, label = self.options, self.inner.schema().label
        columns = tuple(dict.fromkeys((options.item, *options.with_item)))
        items = kept(
            self.inner,
            ("items", columns),
            lambda: Items.of(self.inner, options.item, columns),
        )
        power = options.power if options.by == "popularity" else 0.0
        return DrawnItems(
            items,
            options.item,
            label,
            negatives=options.negatives,
            weights=items.counts.astype(np.float64) ** power,
            never=options.never,
            seed=options.seed,
        )

    @cached_property
    def _request_rows(self) -> RequestRows:
        options, keys = self.options, self.inner.session_keys()
        assert keys is not None, "prepare looked"
        # Those of a reader, with the session where it is asked for.
        first = next(iter(self.inner.reader(rank=0, world_size=1, batch_size=1, split="train")))
        columns = tuple(first.data.schema.names)
        return kept(
            self.inner,
            ("requests", columns, options.negatives, options.seed),
            lambda: RequestRows(
                self.inner,
                keys,
                self.inner.schema().label,
                columns,
                negatives=options.negatives,
                seed=options.seed,
            ),
        )


class NegativesReader(Reader):
    """A batch of another reader, of which each row becomes several.

    Args:
        inner: its batches are smaller by so much.
        expand: makes them whole.
        said: of the draws, JSON values that states remember.
    """

    def __init__(self, inner: Reader, expand: Expand, said: dict[str, Any]) -> None:
        self._inner, self._expand, self._said = inner, expand, said
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Rows]:
        epoch = self._epoch
        for rows in self._inner:
            yield self._expand(rows, epoch)
        self._epoch = epoch + 1

    def blocks(self, worker: int, num_workers: int) -> Iterator[Iterable[Rows]]:
        epoch = self._epoch
        for block in self._inner.blocks(worker, num_workers):
            yield (self._expand(rows, epoch) for rows in block)
        self._epoch = epoch + 1

    def num_blocks(self) -> int | None:
        return self._inner.num_blocks()

    def skip(self, num_batches: int) -> int:
        passed = self._inner.skip(num_batches)
        self._epoch += passed < num_batches
        return passed

    def num_left(self) -> int | None:
        return self._inner.num_left()

    def state_dict(self) -> dict[str, Any]:
        return {**self._said, "epoch": self._epoch, "inner": self._inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if any(state.get(name) != value for name, value in self._said.items()):
            raise DataError(
                "the state is of other negatives: go on with the former options of "
                "ranking.negatives, or start anew"
            )
        inner = state["inner"]
        if isinstance(self._expand, RequestRows) and "log" not in inner["data"]:
            # Of a version that did not note it.
            log = self._inner.state_dict()["data"]["log"]
            inner = {**inner, "data": {**inner["data"], "log": log}}
        self._inner.load_state_dict(inner)
        self._epoch = state["epoch"]
