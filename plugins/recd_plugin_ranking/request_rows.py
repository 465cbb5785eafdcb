"""Negatives that are rows of the log: what a request showed and nobody clicked."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from recd_plugin_ranking.draws import row_keys, unit_floats
from recd_plugin_ranking.items import Int64s, is_positive
from recd_plugins.api import (
    DataError,
    Dataset,
    Piece,
    PlannedReader,
    Reader,
    ReadPlan,
    Rows,
    RowTable,
    SessionKeys,
    Unit,
    rows_of_split,
)

_UNIT_ROWS = 2048


class RequestRows:
    """The training split in memory: its positive rows, each followed by unclicked ones.

    Positive rows of sessions in which nothing is unclicked are left out.

    Args:
        dataset: that is read.
        keys: its columns of session and time.
        label: column of the label.
        columns: of what is handed out.
        negatives: unclicked rows behind a positive one; where a session has fewer, they come again.
        seed: of the draws.

    Raises:
        DataError: a row has no session, or no session has both.
    """

    def __init__(
        self,
        dataset: Dataset,
        keys: SessionKeys,
        label: str,
        columns: Sequence[str],
        *,
        negatives: int,
        seed: int,
    ) -> None:
        parts, sessions, labels = [], [], []
        for rows in rows_of_split(dataset, "train"):
            sessions.append(_sessions(rows, keys.session))
            labels.append(is_positive(rows, label))
            parts.append(Rows(rows.data.select(list(columns)), rows.origins))
        positive = np.concatenate(labels)
        session = pa.concat_arrays(sessions).dictionary_encode().indices.to_numpy()
        unclicked = np.flatnonzero(~positive)
        self._unclicked = unclicked[np.argsort(session[unclicked], kind="stable")]
        self._starts = np.r_[
            0, np.cumsum(np.bincount(session[unclicked], minlength=session.max() + 1))
        ]
        clicked = np.flatnonzero(positive)
        clicked = clicked[np.diff(self._starts)[session[clicked]] > 0]
        if not len(clicked):
            raise DataError(
                f"{dataset.name}: no session has a positive row and one that is none, so there is "
                "nothing to draw in_request; draw by: uniform or popularity"
            )
        self._clicked, self._session = clicked, session
        self._table = RowTable(parts)
        self._negatives, self._seed = negatives, seed

    def positives(self, *, rank: int, world_size: int, batch_size: int, data: Any) -> Reader:
        """A reader of places of positive rows, in a column."""
        units = tuple(
            Unit(0, number, start, min(_UNIT_ROWS, len(self._clicked) - start))
            for number, start in enumerate(range(0, len(self._clicked), _UNIT_ROWS))
        )
        return PlannedReader(
            ReadPlan(units, batch_size),
            self._read,
            data=data,
            what="positive rows with unclicked ones",
            rank=rank,
            world_size=world_size,
            ahead=0,
        )

    def _read(self, pieces: Iterator[Piece]) -> Generator[Rows, None, None]:
        for piece in pieces:
            start = piece.unit.first_row + piece.skip
            places = self._clicked[start : start + piece.num_rows]
            origins = self._table.take(places, {}).origins
            yield Rows(pa.record_batch([pa.array(places)], names=["place"]), origins)

    def __call__(self, positives: Rows, epoch: int) -> Rows:
        """Rows of what ``positives`` reads, each with its unclicked ones."""
        places = positives.data.column("place").to_numpy()
        chosen = self._chosen(places, row_keys(positives, self._seed, epoch))
        return self._table.take(np.concatenate([places[:, None], chosen], 1).ravel(), {})

    def _chosen(self, places: Int64s, keys: Any) -> Int64s:
        """Unclicked rows of each place's session in random order, ``[rows, negatives]``."""
        session = self._session[places]
        starts, sizes = self._starts[session], np.diff(self._starts)[session]
        row = np.repeat(np.arange(len(places)), sizes)
        number = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        order = np.lexsort((unit_floats(keys[row], number), row))
        shuffled = (starts[row] + number)[order]
        first = np.cumsum(sizes) - sizes
        picked = first[:, None] + np.arange(self._negatives) % sizes[:, None]
        return self._unclicked[shuffled[picked]]


def _sessions(rows: Rows, column: str) -> pa.Array:
    """The session of each row, as it is: a float would make one of several large ids."""
    sessions = rows.data.column(column)
    if pt.is_dictionary(sessions.type):
        sessions = sessions.dictionary_decode()
    if (empty := sessions.is_null(nan_is_null=True).index(True).as_py()) >= 0:
        raise DataError(
            f"{rows.place_of(empty)} has no {column}, so by: in_request knows no rows to draw for "
            "it; leave such rows out, or give each a session of its own"
        )
    return sessions
