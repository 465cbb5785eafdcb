"""Access profiles, which contain how often training looks up each row of a table.

Functions represent counts as two arrays: distinct row ids, and the number of lookups of each row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from recd_plugins.runtime.errors import DataError
from recd_plugins.runtime.files import check_regular, new_file

Rows = NDArray[np.int64]
Counts = NDArray[np.float64]

_PENDING_IDS = 1 << 16
_KEY = b"recd_plugins.access_profile"
_VERSION = 1
# Attributes of a table in the metadata of a file; old files lack the last two.
_KEPT = ("features", "num_embeddings", "samples", "total", "error", "dedupe_factor", "batch_size")


def add_counts(rows: Sequence[Rows], counts: Sequence[Counts]) -> tuple[Rows, Counts]:
    """Add up several pairs of row ids and counts. Return sorted row ids and summed counts."""
    every = np.concatenate(rows)
    # NumPy's stable sort is fast here: the input consists of sorted parts.
    order = np.argsort(every, kind="stable")
    every = every[order]
    first = np.empty(len(every), bool)
    first[:1] = True
    np.not_equal(every[1:], every[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    if not len(starts):
        return every, np.empty(0, np.float64)
    return every[starts], np.add.reduceat(np.concatenate(counts)[order], starts)


def keep_most_read(rows: Rows, counts: Counts, bound: int) -> tuple[Rows, Counts, float]:
    """Return ids and counts of the ``bound`` most frequent rows, and the error of the counts.

    Subtracts the largest dropped count from all counts (Misra-Gries; Agarwal et al., Mergeable
    Summaries, PODS 2012, section 2). The total error is below ``all lookups / (bound + 1)``.
    """
    if len(rows) <= bound:
        return rows, counts, 0.0
    error = float(np.partition(counts, len(counts) - bound - 1)[len(counts) - bound - 1])
    keep = counts > error
    return rows[keep], counts[keep] - error, error


# Compared by identity, as arrays have no single truth value.
@dataclass(frozen=True, eq=False)
class TableAccess:
    """Number of lookups of each row of one embedding table.

    For deduplicated data, ``accesses`` may count only unique rows of each batch. Probabilities
    always refer to all rows of the data.

    Attributes:
        table: name of the table.
        features: features that look up the table. Their accesses are summed.
        num_embeddings: number of rows of the table.
        samples: number of data rows that were counted; 1 for a theoretical distribution.
        rows: int64 ``[known]``, ids of table rows with a count, most frequent first.
        accesses: float64 ``[known]``, number of accesses of each of ``rows``.
        total: number of accesses of all table rows.
        error: by how much an element of ``accesses`` may be too small, and upper bound of the
            accesses of a row without a count. 0 if the counts are exact.
        dedupe_factor: number of accesses without deduplication, divided by the counted accesses.
        batch_size: size of the batches whose unique rows were counted; None if all data rows were
            counted.
    """

    table: str
    features: tuple[str, ...]
    num_embeddings: int
    samples: int
    rows: NDArray[np.int64]
    accesses: NDArray[np.float64]
    total: float
    error: float = 0.0
    dedupe_factor: float = 1.0
    batch_size: int | None = None

    @classmethod
    def from_counts(
        cls,
        table: str,
        features: tuple[str, ...],
        num_embeddings: int,
        *,
        samples: int,
        rows: NDArray[np.int64],
        accesses: NDArray[np.float64],
        total: float | None = None,
        error: float = 0.0,
    ) -> Self:
        """Create a profile from counts of distinct table rows in any order.

        ``total`` defaults to the sum of ``accesses``.
        """
        if total is None:
            total = float(accesses.sum())
        if len(rows) > 1 and not bool((rows[1:] > rows[:-1]).all()):
            order = np.argsort(rows)
            rows, accesses = rows[order], accesses[order]
        order = np.argsort(-accesses, kind="stable")
        by_count = rows[order], accesses[order]
        return cls(table, features, num_embeddings, samples, *by_count, total, error)

    def of_unique_rows(self, batch_size: int, every_row: float) -> TableAccess:
        """Return a copy that is marked as counting only the unique rows of each batch.

        Args:
            batch_size: size of the batches whose unique rows were counted.
            every_row: number of accesses without deduplication.
        """
        factor = max(1.0, every_row / self.total) if self.total else 1.0
        return replace(self, dedupe_factor=factor, batch_size=batch_size)

    @property
    def length(self) -> float:
        """Mean accesses per sample without deduplication, called L in the FlexShard paper."""
        return self.total * self.dedupe_factor / self.samples

    def probabilities(self) -> NDArray[np.float64]:
        """Return accesses per sample of each of ``rows``, float64 ``[known]``, in descending order.

        Called p in the FlexShard paper (arXiv 2301.02959, section 3). A row that samples look up
        several times can have a value above 1.
        """
        return self.accesses * self.dedupe_factor / self.samples

    @property
    def tail_rows(self) -> int:
        """Number of table rows that are not in ``rows``."""
        return self.num_embeddings - len(self.rows)

    @cached_property
    def tail_accesses(self) -> float:
        """Total accesses of table rows that are not in ``rows``."""
        return max(0.0, self.total - float(self.accesses.sum()))

    @property
    def tail_probability(self) -> float:
        """Mean accesses per sample, before dedup, of a row not in ``rows``; 0 for exact counts."""
        if not self.tail_rows:
            return 0.0
        return self.tail_accesses * self.dedupe_factor / self.samples / self.tail_rows

    def covered(self, num_rows: int) -> float:
        """Return the fraction of accesses that go to the ``num_rows`` most frequent rows."""
        known = min(num_rows, len(self.rows))
        accesses = float(self.accesses[:known].sum())
        if self.tail_rows:
            accesses += self.tail_accesses * (num_rows - known) / self.tail_rows
        return accesses / self.total if self.total else 0.0

    def merge(self, other: TableAccess) -> TableAccess:
        """Return a profile with the summed counts of two profiles of the same table.

        Raises:
            DataError: the tables differ, or only one of the profiles counts unique rows.
        """
        for what in ("table", "features", "num_embeddings"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                raise DataError(
                    f"table {self.table!r}: {what} is {mine} in one profile, but {theirs} in the "
                    "other. Merge only profiles of the same model"
                )
        if self.batch_size != other.batch_size:
            raise DataError(
                f"table {self.table!r}: one profile counts {self.counted}, but the other counts "
                f"{other.counted}. Create both with recd profile registry --all-rows"
            )
        rows, accesses = add_counts([self.rows, other.rows], [self.accesses, other.accesses])
        merged = TableAccess.from_counts(
            self.table,
            self.features,
            self.num_embeddings,
            samples=self.samples + other.samples,
            rows=rows,
            accesses=accesses,
            total=self.total + other.total,
            error=self.error + other.error,
        )
        if self.batch_size is None:
            return merged
        every_row = sum(each.total * each.dedupe_factor for each in (self, other))
        return merged.of_unique_rows(self.batch_size, every_row)

    @property
    def counted(self) -> str:
        """Description of the counted data rows, for error messages."""
        if self.batch_size is None:
            return "all rows"
        return f"the unique rows of batches of {self.batch_size:,}"


class TableCounter:
    """Counts ids: exactly up to ``bound`` distinct rows, then with a Misra-Gries sketch.

    Args:
        bound: maximum number of distinct rows to count. A row needs 16 bytes of memory, and up to
            64 bytes while counts are merged.

    Attributes:
        total: number of added ids.
    """

    def __init__(self, bound: int) -> None:
        self.total = 0
        self._bound = bound
        self._rows: Rows = np.empty(0, np.int64)
        self._counts: Counts = np.empty(0, np.float64)
        self._error = 0.0
        self._pending: list[Rows] = []
        self._num_pending = 0

    def add(self, ids: NDArray[np.int64]) -> None:
        """Count ids, int64 ``[num_ids]``. The array is copied."""
        self._pending.append(ids.copy())
        self._num_pending += len(ids)
        self.total += len(ids)
        # Keeps the work per id constant.
        if self._num_pending >= max(_PENDING_IDS, len(self._rows) // 2):
            self._add_up()

    def access(
        self,
        table: str,
        features: tuple[str, ...],
        num_embeddings: int,
        samples: int,
        *,
        maps_ids: bool = False,
    ) -> TableAccess:
        """Return the counted ids of ``samples`` data rows as a table's profile.

        With ``maps_ids``, ids are not rows. The profile then numbers the most read ids from 0.
        """
        self._add_up()
        if maps_ids:
            self._counts = np.sort(self._counts)[::-1][:num_embeddings]
            self._rows = np.arange(len(self._counts))
        return TableAccess.from_counts(
            table,
            features,
            num_embeddings,
            samples=samples,
            rows=self._rows,
            accesses=self._counts,
            total=float(self.total),
            error=self._error,
        )

    def _add_up(self) -> None:
        if not self._pending:
            return
        rows, new = np.unique(np.concatenate(self._pending), return_counts=True)
        self._pending, self._num_pending = [], 0
        rows, counts = add_counts([self._rows, rows], [self._counts, new.astype(np.float64)])
        self._rows, self._counts, error = keep_most_read(rows, counts, self._bound)
        self._error += error


@dataclass(frozen=True, eq=False)
class AccessProfile:
    """Access counts of the rows of several tables.

    Attributes:
        tables: maps the table name to its access counts.
        source: description of the counted data, for messages.
        path: file of a loaded profile, otherwise None.
    """

    tables: Mapping[str, TableAccess]
    source: str
    path: Path | None = None

    @classmethod
    def load(cls, path: str | Path) -> AccessProfile:
        """Read an access profile from a Parquet file.

        Raises:
            DataError: the file is missing or damaged, or is not an access profile.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = Path(path)
        try:
            check_regular(path)
            lines = pq.read_table(path, page_checksum_verification=True, partitioning=None)
        except FileNotFoundError as error:
            raise DataError(
                f"{path}: no such file. Create it with recd profile registry REGISTRY -o {path}"
            ) from error
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{path}: the access profile is damaged or not Parquet: "
                f"{' '.join(str(error).split()).rstrip('.')}. Create it again with `recd profile "
                "registry`"
            ) from error
        head = json.loads((lines.schema.metadata or {}).get(_KEY, "{}"))
        if head.get("version") != _VERSION:
            raise DataError(
                f"{path}: this is not an access profile of version {_VERSION}. Create one with "
                "recd profile registry"
            )
        rows, accesses = (lines[name].to_numpy() for name in ("row", "accesses"))
        tables, start = {}, 0
        for each in head["tables"]:
            known = slice(start, start := start + each["known_rows"])
            kept = {key: each[key] for key in _KEPT if key in each}
            kept["features"] = tuple(kept["features"])
            tables[each["table"]] = TableAccess(
                table=each["table"], rows=rows[known], accesses=accesses[known], **kept
            )
        return cls(tables, head["source"], path)

    def save(self, path: str | Path) -> None:
        """Write a Parquet file with one record per counted table row, and JSON metadata.

        Raises:
            RecdError: ``path`` cannot be written.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        head: dict[str, Any] = {"version": _VERSION, "source": self.source, "tables": []}
        tables: list[pa.Table] = []
        for name, table in self.tables.items():
            known = {key: value for key, value in vars(table).items() if key in _KEPT}
            head["tables"].append({**known, "table": name, "known_rows": len(table.rows)})
            names = pa.DictionaryArray.from_arrays(
                np.zeros(len(table.rows), np.int32), pa.array([name])
            )
            columns = [names, pa.array(table.rows), pa.array(table.accesses)]
            tables.append(pa.table(columns, names=["table", "row", "accesses"]))
        lines = pa.concat_tables(tables).unify_dictionaries()
        with new_file(Path(path)) as temporary:
            pq.write_table(
                lines.replace_schema_metadata({_KEY: json.dumps(head)}),
                temporary,
                compression="zstd",
                use_dictionary=["table", "accesses"],
                column_encoding={"row": "DELTA_BINARY_PACKED"},
                write_page_checksum=True,
            )

    def merge(self, other: AccessProfile) -> AccessProfile:
        """Return a profile with the summed counts of two profiles.

        Raises:
            DataError: a table has different features or sizes in the two profiles, or only one
                profile counts unique rows.
        """
        tables = dict(self.tables)
        for name, table in other.tables.items():
            tables[name] = tables[name].merge(table) if name in tables else table
        return AccessProfile(tables, f"{self.source}; {other.source}")

    def covering(self, table: str, num_embeddings: int) -> TableAccess:
        """Return the access counts of a table, which must have ``num_embeddings`` rows.

        Raises:
            DataError: the table is not in the profile, or has another number of rows.
        """
        found = self.tables.get(table)
        name = f"the access profile {f'{self.path} ' if self.path else ''}of {self.source}"
        if found is None:
            raise DataError(
                f"{name} does not contain table {table!r}, only: "
                f"{', '.join(map(repr, self.tables)) or 'none'}. Profile this table with recd "
                "profile registry"
            )
        if found.num_embeddings != num_embeddings:
            raise DataError(
                f"{name} has {found.num_embeddings:,} rows for table {table!r}, but the model has "
                f"{num_embeddings:,}. Profile the data again with recd profile registry"
            )
        return found
