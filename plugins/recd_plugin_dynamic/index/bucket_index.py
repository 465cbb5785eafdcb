"""The index of one rank: maps the ids of its buckets to table rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recd_plugin_dynamic.index import kernels
from recd_plugin_dynamic.index.mix import bucket_of, mix
from recd_plugin_dynamic.index.policies import Candidates, EvictionPolicy, NoEviction
from recd_plugins.api import DataError, SetupError

Ids = NDArray[np.int64]

# A full bucket evicts at least this share of its rows, because scores of all rows are computed.
_SHARE = 1 / 32


@dataclass(frozen=True)
class Assigned:
    """The rows of a batch's ids.

    Attributes:
        rows: row of each id in the table, int64 ``[n]``. -1 stands for ids without a row.
        new: indices of the ids that got a row in this batch, int64.
        evicted_ids: ids that lost their rows, int64.
        evicted_rows: rows of ``evicted_ids``, int64. New ids of this batch may reuse them.
    """

    rows: Ids
    new: Ids
    evicted_ids: Ids
    evicted_rows: Ids


class IdIndex:
    """Maps ids to the rows of a table, for the buckets of one rank.

    The bucket of an id is ``bucket_of(mix(id), num_buckets)``. Bucket b owns the rows
    ``[b * rows_per_bucket, (b + 1) * rows_per_bucket)`` of the table. Buckets admit and evict ids
    independently, so rows do not depend on the number of ranks or the order of ids in a batch.

    Args:
        first_bucket: first bucket of this rank.
        last_bucket: end of the buckets of this rank, exclusive.
        num_buckets: number of buckets of all ranks.
        rows_per_bucket: capacity of each bucket. Choose at least 100, since buckets
            differ in their numbers of ids.
        policy: selects the ids that a full bucket evicts.
        skip_if_full: whether new ids get row -1 if their bucket is full, instead of an error.
        min_count: number of occurrences that an id needs to get a row, including those in the
            current batch. Ids without a row get row -1.
        candidates_per_bucket: maximum number of ids without a row for which a bucket keeps counts.
            The least recently used ids are forgotten. The default is ``rows_per_bucket``.
        reserved_rows: number of first rows of each bucket that no id gets.
    """

    def __init__(
        self,
        first_bucket: int,
        last_bucket: int,
        num_buckets: int,
        rows_per_bucket: int,
        policy: EvictionPolicy,
        *,
        skip_if_full: bool = False,
        min_count: int = 1,
        candidates_per_bucket: int | None = None,
        reserved_rows: int = 0,
    ) -> None:
        self.first_bucket, self.last_bucket = first_bucket, last_bucket
        self.num_buckets, self.rows_per_bucket = num_buckets, rows_per_bucket
        self.policy = policy
        self._skip_if_full, self._min_count = skip_if_full, min_count
        self._reserved_rows = reserved_rows
        self._candidates: IdIndex | None = None
        if min_count > 1:
            self._candidates = IdIndex(
                first_bucket,
                last_bucket,
                num_buckets,
                candidates_per_bucket or rows_per_bucket,
                Candidates(),
                skip_if_full=True,
            )
        shape = (last_bucket - first_bucket, rows_per_bucket)
        self._first_row = first_bucket * rows_per_bucket
        self._ids: Ids = np.full(shape, -1, np.int64)
        self._arrays: dict[str, NDArray[Any]] = {"last_step": np.zeros(shape, np.int32)}
        self._arrays |= {name: np.zeros(shape, dtype) for name, dtype in policy.arrays.items()}
        self._flat = {name: array.reshape(-1) for name, array in self._arrays.items()}
        self._cursors = np.full(shape[0], reserved_rows, np.int64)
        self._used = np.zeros(shape[0], np.int64)
        self._at_once = int(rows_per_bucket * _SHARE)
        self._slots = kernels.empty_slots(self._ids.size)

    def __len__(self) -> int:
        """Return the number of ids that have a row."""
        return int(self._used.sum())

    @property
    def num_bytes(self) -> int:
        """Bytes of the index, including counts of ids that are not admitted yet."""
        slots = 0 if self._candidates is None else self._candidates._slots.nbytes
        return slots + self._slots.nbytes + sum(each.nbytes for each in self.state().values())

    def find(self, ids: Ids) -> Ids:
        """Return the row of each id, or -1 for unknown ids, int64 ``[n]``. Changes nothing."""
        return self._to_table(self._find(ids)[0])

    def find_or_insert(self, ids: Ids, counts: Ids | None, step: int) -> Assigned:
        """Return the rows of a batch's ids, and give rows to new ids.

        Args:
            ids: distinct ids of buckets of this rank, int64 ``[n]``, in any order.
            counts: occurrences of each id in the batch, int64 ``[n]``, or None for 1 each.
            step: number of the training step.

        Raises:
            DataError: if an id is negative.
            SetupError: if a bucket has too few rows that can be evicted.
        """
        counts = np.broadcast_to(np.int64(1), len(ids)) if counts is None else counts
        rows, unknown = self._find(ids)
        known = np.flatnonzero(rows >= 0) if len(unknown) else slice(None)
        self._update(rows[known], counts[known], step)
        evicted = [self._remove(self._expired(step))]
        if self._candidates is not None and len(unknown):
            unknown = unknown[
                self._candidates._count(ids[unknown], counts[unknown], step, self._min_count)
            ]
        if len(unknown):
            mixed = mix(ids[unknown])
            order = np.argsort(mixed)
            unknown, buckets = unknown[order], bucket_of(mixed[order], self.num_buckets)
            buckets -= self.first_bucket
            evicted.append(self._make_room(buckets, step))
            if self._skip_if_full:
                first = np.searchsorted(buckets, buckets)
                fits = np.arange(len(buckets)) - first < self._free()[buckets]
                unknown, buckets = unknown[fits], buckets[fits]
            rows[unknown] = self._insert(ids[unknown], buckets)
            self._update(rows[unknown], counts[unknown], step)
        evicted_ids, evicted_rows = (np.concatenate(each) for each in zip(*evicted, strict=True))
        return Assigned(self._to_table(rows), unknown, evicted_ids, self._to_table(evicted_rows))

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the arrays to checkpoint, each ``[last_bucket - first_bucket, ...]``.

        The arrays share memory with the index. ``ids`` contains -1 for free rows.
        """
        candidates = {} if self._candidates is None else self._candidates.state()
        return {
            "ids": self._ids,
            **self._arrays,
            **{f"candidate_{name}": array for name, array in candidates.items()},
        }

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Replace the contents by a state, for instance slices of states of other ranks."""
        for name, array in self.state().items():
            array[:] = state[name]
        self._rebuild()
        if self._candidates is not None:
            self._candidates._rebuild()

    def _rebuild(self) -> None:
        """Derive the hash table and the numbers of used rows from ``ids``."""
        self._cursors[:] = self._reserved_rows
        self._used[:] = (self._ids >= 0).sum(1)
        self._slots[:] = -1
        kernels.insert(self._ids.reshape(-1), np.arange(self._ids.size), self._slots)

    def _find(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the local row of each id, or -1, and the indices of unknown ids."""
        rows, unknown = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        if len(ids) and ids.min() < 0:
            raise DataError(
                f"dynamic table: id '{ids.min()}' is negative. Ids have to be between 0 and "
                "2^63 - 1."
            )
        num_unknown = kernels.find(ids, self._slots, rows, unknown)
        return rows, unknown[:num_unknown]

    def _to_table(self, rows: Ids) -> Ids:
        return np.where(rows < 0, -1, rows + self._first_row) if self._first_row else rows

    def _free(self) -> Ids:
        return self.rows_per_bucket - self._reserved_rows - self._used

    def _update(self, rows: Ids, counts: Ids, step: int) -> None:
        self._call("update", self._flat, rows, counts, step)
        self._flat["last_step"][rows] = step

    def _count(self, ids: Ids, counts: Ids, step: int, min_count: int) -> NDArray[np.bool_]:
        """Count occurrences of candidates. Return which ids have ``min_count``, and remove them."""
        self.find_or_insert(ids, counts, step)
        rows = self._find(ids)[0]
        counted = rows >= 0
        enough = counts >= min_count
        enough[counted] = self._flat["count"][rows[counted]] >= min_count
        self._remove(rows[enough & counted])
        return enough

    def _insert(self, ids: Ids, buckets: Ids) -> Ids:
        """Give rows to new ids, in ascending order of mixed ids."""
        rows = np.empty(len(ids), np.int64)
        kernels.take_rows(ids, buckets, self._ids, self._cursors, rows)
        kernels.insert(ids, rows, self._slots)
        self._used += np.bincount(buckets, minlength=len(self._used))
        for array in self._flat.values():
            array[rows] = 0
        return rows

    def _remove(self, rows: Ids) -> tuple[Ids, Ids]:
        """Free local rows. Return their ids and the rows."""
        ids = self._ids.reshape(-1)[rows]
        kernels.remove(ids, self._slots)
        self._ids.reshape(-1)[rows] = -1
        buckets = rows // self.rows_per_bucket
        self._used -= np.bincount(buckets, minlength=len(self._used))
        np.minimum.at(self._cursors, buckets, rows % self.rows_per_bucket)
        return ids, rows

    def _expired(self, step: int) -> Ids:
        """Return the local rows that a sweep of all buckets evicts in this step."""
        if not self.policy.sweep_every or step % self.policy.sweep_every:
            return np.empty(0, np.int64)
        leaving = [self._lowest(bucket, 0, step) for bucket in range(len(self._used))]
        return np.concatenate([np.empty(0, np.int64), *leaving])

    def _make_room(self, buckets: Ids, step: int) -> tuple[Ids, Ids]:
        """Evict rows of full buckets. ``buckets``, int64 ``[n]``, has the bucket of each new id."""
        needed = np.bincount(buckets, minlength=len(self._used)) - self._free()
        leaving = [np.empty(0, np.int64)]
        for bucket in np.flatnonzero(needed > 0).tolist():
            rows = self._lowest(bucket, max(needed[bucket], self._at_once), step)
            if len(rows) < needed[bucket] and not self._skip_if_full:
                raise SetupError(
                    f"dynamic table: bucket {self.first_bucket + bucket} with a capacity of "
                    f"{self.rows_per_bucket - self._reserved_rows:,} ids cannot take "
                    f"{(buckets == bucket).sum():,} new ids at step {step}: policy "
                    f"'{self.policy.name}' evicts only {len(rows):,} of its "
                    f"{self._used[bucket]:,} ids, and ids of the current batch stay. Increase the "
                    "rows of the table, or choose another eviction policy."
                )
            leaving.append(rows)
        return self._remove(np.concatenate(leaving))

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.policy, method)(*arguments)
        except Exception as error:
            raise SetupError(
                f"eviction policy '{self.policy.name}': {method} failed: {type(error).__name__}: "
                f"{error}. Correct the policy."
            ) from error

    def _lowest(self, bucket: int, num: int, step: int) -> Ids:
        """Return local rows of a bucket to evict: the ``num`` lowest, and all of score ``-inf``."""
        if isinstance(self.policy, NoEviction):
            return np.empty(0, np.int64)
        arrays = {name: array[bucket] for name, array in self._arrays.items()}
        ids = self._ids[bucket]
        rows = np.flatnonzero((ids >= 0) & (arrays["last_step"] < step))
        scores = np.asarray(self._call("score", arrays, step))
        if scores.shape != ids.shape or np.isnan(scores).any():
            raise SetupError(
                f"eviction policy '{self.policy.name}': score returned {scores.shape} values, or "
                f"NaN. Return a number for each of the {len(ids):,} rows of a bucket."
            )
        scores = scores[rows]
        num = min(max(num, (scores == -np.inf).sum()), (scores < np.inf).sum())
        if num:
            highest = np.partition(scores, num - 1)[num - 1]
            ties = rows[scores == highest]
            rows = rows[scores < highest]
            ties = ties[np.argsort(mix(ids[ties]))[: num - len(rows)]]
            rows = np.concatenate([rows, ties])
        return rows[:num] + bucket * self.rows_per_bucket
