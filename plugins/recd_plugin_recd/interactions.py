"""The dataset plugin ``recd.interactions``, which reads logs of user-item interactions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from recd_plugin_recd.interactions_log import (
    DENSE,
    LABEL,
    SESSION,
    SPARSE,
    TIMESTAMP,
    Events,
    InteractionLog,
    detect_format,
    read_events,
)
from recd_plugins.api import (
    DataError,
    Dataset,
    FeatureSchema,
    Origin,
    PluginOptions,
    Reader,
    Rows,
    SessionKeys,
    Split,
    readers,
)

#: Function that builds rows from the places of events in the log.
RowsOf = Callable[[NDArray[np.int64]], pa.RecordBatch]

# Number of rows whose lists are built at once.
_UNIT_ROWS = 2048
# Seconds since 1970 reach this in the year 5138, milliseconds did in 1973.
_LATEST_SECOND = 1e11


class RefreshOptions(BaseModel):
    """The option ``refresh``, which says how often the features of a user change."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    per: Literal["event", "request", "session"] = Field(
        default="event",
        description="When user features are updated: at each event, request or session.",
    )
    impressions: PositiveInt = Field(
        default=10, description="Number of consecutive events that form a request."
    )


class SplitOptions(BaseModel):
    """Option ``test``: the events of the test and validation splits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    by: Literal["time", "leave_one_out"] = Field(
        default="time",
        description="Events in the test split. time: the last test_fraction of all events. "
        "leave_one_out: the last event of each user with at least two events.",
    )
    validation: bool = Field(
        default=False,
        description="For leave_one_out: also exclude the second-to-last event of users "
        "with at least three events from training.",
    )


class Interactions(Dataset):
    """Reads a log of user-item interactions (MovieLens, RecBole, CSV) as training samples."""

    name = "recd.interactions"
    free_options = frozenset({"path", "prefetch"})

    class Options(PluginOptions):
        path: Path = Field(description="The log: a .inter, .tsv, .csv, .dat or other text file.")
        user: str = Field(default="user_id", description="Column of the user id.")
        item: str = Field(default="item_id", description="Column of the item id.")
        value: str | None = Field(
            default="rating",
            description="Column of a value, such as a rating. See positive_threshold.",
        )
        label: str | None = Field(
            default=None, description="Column of a label, 0 or 1. Replaces value."
        )
        timestamp: str = Field(default="timestamp", description="Column of the Unix time.")
        timestamp_unit: Literal["s", "ms"] = Field(
            default="s", description="Unit of the timestamp."
        )
        separator: str | None = Field(
            default=None,
            min_length=1,
            description="Column separator. null chooses it from the suffix: tab for .inter, "
            ".tsv and .data, comma for .csv, :: for .dat.",
        )
        header: bool | list[str] | None = Field(
            default=None,
            description="true: the first line has the column names. Or a list of column names. "
            "null: true, except for .dat and .data, which have user_id, item_id, rating and "
            "timestamp.",
        )
        session_gap_minutes: float = Field(
            default=30, gt=0, description="Minutes without events after which a session ends."
        )
        positive_threshold: float = Field(
            default=4, description="Minimum value of a positive event (label 1, liked)."
        )
        history: PositiveInt = Field(
            default=50,
            description="Maximum number of items in history features. The latest items are used.",
        )
        refresh: RefreshOptions = Field(
            default=RefreshOptions(), description="When user features are updated."
        )
        test_fraction: float = Field(
            default=0.1,
            ge=0,
            lt=1,
            description="Fraction of events in the test split, taken from the end.",
        )
        test: SplitOptions = Field(
            default=SplitOptions(), description="How the test split is selected."
        )
        order: Literal["session", "time", "shuffled"] = Field(
            default="session",
            description="Order of rows. session: one session after another. time: all rows by "
            "time. shuffled: groups of rows with equal user features, in another order in each "
            "epoch.",
        )
        seed: int = Field(default=0, ge=0, description="Seed for order: shuffled.")
        prefetch: NonNegativeInt = Field(
            default=4,
            description="Number of batches to prefetch in a thread; 0 disables prefetching.",
        )

        @model_validator(mode="after")
        def _has_outcome(self) -> Self:
            if self.value is None and self.label is None:
                raise ValueError(
                    "options 'value' and 'label' are both null, so rows have no label. Set one of "
                    "them to the name of a column."
                )
            return self

    options: Options
    #: The training dataset when this log is scored. The scored log may lack outcomes.
    _trained: Interactions | None = None

    def prepare(self) -> None:
        _ = self._log

    def identity(self) -> dict[str, Any]:
        return {"events": self._identity["events"]}

    def schema(self) -> FeatureSchema:
        return FeatureSchema(SPARSE, DENSE, LABEL)

    def left_out(self) -> dict[str, str]:
        options = self.options
        layout = detect_format(options.path, options.separator, options.header)
        used = {options.user, options.item, options.timestamp, options.label or options.value}
        return {name: "not used by any option" for name in layout.names if name not in used}

    def splits(self) -> tuple[Split, ...]:
        options = self.options
        by_user = options.test.by == "leave_one_out"
        return ("train", "test") if by_user or options.test_fraction else ("train",)

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        return self._reader(self._log.rows, rank, world_size, batch_size, split)

    def session_reader(
        self, *, rank: int, world_size: int, batch_size: int, split: Split
    ) -> Reader:
        return self._reader(self._log.rows_with_keys, rank, world_size, batch_size, split)

    def _reader(
        self, rows: RowsOf, rank: int, world_size: int, batch_size: int, split: Split
    ) -> Reader:
        places = self._places(split)
        return readers.PlannedReader(
            self._plan(places, batch_size, split),
            lambda pieces: self._read(rows, places, pieces),
            data={"split": split, **self._identity},
            what=f"{self.options.path} ({split})",
            rank=rank,
            world_size=world_size,
            ahead=self.options.prefetch,
        )

    def _plan(self, places: NDArray[np.int64], batch_size: int, split: Split) -> readers.ReadPlan:
        if self.options.order != "shuffled" or split != "train":
            return readers.ReadPlan(_units(len(places)), batch_size)
        starts = np.flatnonzero(np.diff(self._log.anchors[places], prepend=-1))
        ends = [*starts[1:].tolist(), len(places)]
        groups = enumerate(zip(starts.tolist(), ends, strict=True))
        units = tuple(readers.Unit(0, group, start, end - start) for group, (start, end) in groups)
        return readers.ReadPlan(units, batch_size, shuffle=True, seed=self.options.seed)

    def session_keys(self) -> SessionKeys:
        return SessionKeys(SESSION, TIMESTAMP)

    def scan(self, split: Split = "train") -> Iterator[Rows]:
        places = self._places(split)
        for unit in _units(len(places)):
            chosen = places[unit.first_row : unit.first_row + unit.num_rows]
            yield Rows(self._log.rows_with_keys(chosen), self._origins(self._log.file_rows[chosen]))

    def to_score(self, location: str) -> Interactions:
        """Return a dataset that yields every event of the log at ``location`` in file order.

        Outcomes may be empty. Events without an outcome do not influence the features of others.
        """
        values = {**self.options.model_dump(), "path": location, "test_fraction": 0}
        scored = type(self)(type(self.options).model_validate(values))
        scored._trained = self
        return scored

    def kinds(self) -> Mapping[str, str]:
        """Return a dict from id column to ``numbers`` or ``text``. Empty if the log is missing."""
        try:
            return self._events.kinds
        except DataError:
            return {}

    @cached_property
    def _events(self) -> Events:
        options = self.options
        trained = self._trained
        events = read_events(
            options.path,
            detect_format(options.path, options.separator, options.header),
            user=options.user,
            item=options.item,
            outcome=options.label or options.value or "",
            timestamp=options.timestamp,
            outcome_option="label" if options.label else "value",
            kinds=None if trained is None else trained.kinds() or trained.trained_kinds,
        )
        if options.timestamp_unit == "ms":
            return replace(events, times=events.times / 1000)
        if events.times.max() > _LATEST_SECOND:
            raise DataError(
                f"{options.path}: column {options.timestamp!r} contains {events.times.max():.0f}, "
                "which is too large for a time in seconds. Set timestamp_unit: ms."
            )
        return events

    @cached_property
    def _log(self) -> InteractionLog:
        options = self.options
        return InteractionLog(
            self._events,
            self._liked(self._events.outcomes),
            session_gap=options.session_gap_minutes * 60,
            refresh=options.refresh.per,
            impressions=options.refresh.impressions,
            history=options.history,
            own_anchors=1 + options.test.validation if options.test.by == "leave_one_out" else 0,
            known=~np.isnan(self._events.outcomes),
        )

    @cached_property
    def _identity(self) -> dict[str, object]:
        """Return options and a digest of the events. A reader resumes only if they are the same."""
        content = hashlib.sha256()
        for array in (self._events.users, self._events.items, self._events.times, self._log.liked):
            content.update(array.tobytes())
        names = {"session_gap_minutes", "history", "refresh", "test_fraction", "order"}
        if self.options.test != SplitOptions():
            names.add("test")
        return {
            "events": content.hexdigest()[:16],
            **self.options.model_dump(mode="json", include=names),
        }

    def _liked(self, outcomes: NDArray[np.float64]) -> NDArray[np.bool_]:
        if self.options.label is None:
            return outcomes >= self.options.positive_threshold
        wrong = np.flatnonzero(~np.isin(outcomes, (0, 1)) & ~np.isnan(outcomes))
        if len(wrong):
            raise DataError(
                f"{self.options.path}: column {self.options.label!r} contains "
                f"{outcomes[wrong[0]]:g} in row {wrong[0]} (from 0), but labels must be 0 or 1. "
                "Fix the value, or use the options 'value' and 'positive_threshold' instead of "
                "'label'."
            )
        return outcomes == 1

    def _places(self, split: Split) -> NDArray[np.int64]:
        """Return the indices of a split's events in reading order, int64."""
        log = self._log
        if self._trained is not None:
            return np.argsort(log.file_rows)
        # Sessions follow each other by the time of their first event.
        by_time = self.options.order == "time"
        order = np.argsort(log.ranks if by_time else log.ranks[log.session_starts], kind="stable")
        return order[self._in_split(split)[order]]

    def _in_split(self, split: Split) -> NDArray[np.bool_]:
        log, options = self._log, self.options
        if options.test.by == "time":
            num_train = len(log) - round(len(log) * options.test_fraction)
            in_train = log.ranks < num_train
            return in_train if split == "train" else ~in_train
        if split == "test":
            return log.is_last(1)
        return ~(log.is_last(1) | (log.is_last(2) & options.test.validation))

    def _read(
        self, rows: RowsOf, places: NDArray[np.int64], pieces: Iterator[readers.Piece]
    ) -> Generator[Rows, None, None]:
        for piece in pieces:
            start = piece.unit.first_row + piece.skip
            chosen = places[start : start + piece.num_rows]
            yield Rows(rows(chosen), self._origins(self._log.file_rows[chosen]))

    def _origins(self, file_rows: NDArray[np.int64]) -> tuple[Origin, ...]:
        """Return the file and the row numbers in the file, from 0, for error messages."""
        runs = np.split(file_rows, np.flatnonzero(np.diff(file_rows) != 1) + 1)
        return tuple(Origin(str(self.options.path), int(run[0]), len(run)) for run in runs)


def _units(num_rows: int) -> tuple[readers.Unit, ...]:
    return tuple(
        readers.Unit(0, group, first_row, min(_UNIT_ROWS, num_rows - first_row))
        for group, first_row in enumerate(range(0, num_rows, _UNIT_ROWS))
    )
