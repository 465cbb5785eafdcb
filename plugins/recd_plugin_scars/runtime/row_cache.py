"""Fetches the rows of each batch into the cache, and writes evicted rows back."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recd_plugin_scars.runtime.policies import CachedShard, ShardRows, SlotLists
from recd_plugin_scars.runtime.slots import Admitted, SlotPool
from recd_plugin_scars.runtime.stores import RowMover
from recd_plugin_scars.runtime.tables import FastMemory
from recd_plugins.api import DataError

# Rows per flush or load operation.
_CHUNK = 1 << 16


@dataclass
class CacheTraffic:
    """Cache traffic of one table on this rank, counted in training mode.

    Bytes include weights and optimizer state, but not row numbers. With column-wise sharding, each
    column shard counts separately.

    Attributes:
        lookups: number of looked-up ids.
        unique_rows: number of distinct rows per batch, summed over batches.
        hits: number of unique rows that were in the cache.
        misses: number of unique rows that were read from the backing store.
        bytes_read: bytes read from the backing store.
        bytes_written: bytes of evicted rows written to the backing store.
        by_policy: custom counters of the cache policy, keyed by name.
    """

    lookups: int = 0
    unique_rows: int = 0
    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    by_policy: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: CacheTraffic) -> CacheTraffic:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return CacheTraffic(**sums)


class CachedBatch:
    """A batch whose rows are in the cache until the batch is released.

    ``slot_of_id`` is the cache slot of each id, int64 ``[num_ids]``.
    """

    def __init__(self, number: int, admitted: Admitted, slot_of_id: Tensor) -> None:
        self.number = number
        self.slot_of_id = slot_of_id
        self.admitted = admitted
        self.is_released = False
        self._ready: torch.cuda.Event | None = None
        if slot_of_id.is_cuda:
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(slot_of_id.device))

    def wait(self) -> None:
        """Make the current CUDA stream wait until ``slot_of_id`` is computed."""
        if self._ready is not None:
            stream = torch.cuda.current_stream(self.slot_of_id.device)
            stream.wait_event(self._ready)
            self.slot_of_id.record_stream(stream)


class RowCache:
    """Moves rows of a kernel's tables between the cache and the backing store of all rows.

    Call ``admit`` to start fetching a batch's rows, ``land`` before its forward and its backward
    pass, and ``release`` afterwards. Rows of batches in flight are not evicted. The class is
    thread-safe, but ``admit`` must not run during a forward or backward pass of another thread,
    because ``admit`` may reallocate the cache memory. ``shards`` are in the order of the backing
    store's rows.
    """

    def __init__(self, shards: Sequence[CachedShard], fast: FastMemory, mover: RowMover) -> None:
        self._shards, self._fast, self._mover = shards, fast, mover
        first_rows = np.cumsum([0, *(shard.num_rows for shard in shards)])
        hot = [shard.hot_rows + first for shard, first in zip(shards, first_rows, strict=False)]
        self._pool = SlotPool(
            [shard.num_rows for shard in shards],
            np.concatenate(hot),
            sum(shard.capacity for shard in shards),
        )
        ends = np.cumsum([0, *map(len, hot)])
        lists = SlotLists(self._pool)
        self._policies = [
            shard.policy(ShardRows(lists, table, shard.capacity, (ends[table], ends[table + 1])))
            for table, shard in enumerate(shards)
        ]
        self.traffic = [CacheTraffic(by_policy=policy.counts) for policy in self._policies]
        self.is_counting = True
        state_bytes = 0 if fast.state is None else fast.state[0].nbytes
        self._row_bytes = fast.weights[0].nbytes + state_bytes
        self._is_stale = len(ends) > 0
        self._num_batches = 0
        self._waiting: deque[tuple[CachedBatch, Future[tuple[Tensor, Tensor | None]]]] = deque()
        self._abandoned: deque[CachedBatch] = deque()
        self._lock = threading.RLock()
        fast.resize(self._pool.num_slots)

    def admit(
        self, ids: Tensor, ids_per_feature: Sequence[int], tables: Sequence[int]
    ) -> CachedBatch:
        """Assign slots of the cache memory to the rows of a batch, and start to read missing rows.

        Args:
            ids: ids of all features, feature by feature, on the CPU, ``[num_ids]``.
            ids_per_feature: number of ids of each feature.
            tables: index of the table of each feature, ascending.

        Raises:
            DataError: an id is not a row of its table. The cache is unchanged then.
        """
        self._check(ids, ids_per_feature, tables)
        with self._lock:
            self._release_abandoned()
            self._load()
            admitted = self._pool.admit(_split(ids.numpy(), ids_per_feature), tables)
            if self._pool.num_slots > self._fast.num_slots:
                self._fast.resize(self._pool.num_slots)
            rows = self._pool.row_of_slot[admitted.missing]
            self._num_batches += 1
            slot_of_id = self._on_device(admitted.slot_of_id)
            batch = CachedBatch(self._num_batches, admitted, slot_of_id)
            if len(rows):
                self._waiting.append((batch, self._mover.read(torch.from_numpy(rows))))
            if self.is_counting:
                for table, num_ids in zip(tables, ids_per_feature, strict=True):
                    self.traffic[table].lookups += num_ids
                self._count_batch(admitted)
            return batch

    def land(self, batch: CachedBatch) -> None:
        """Wait for missing rows of this and all earlier batches, and copy them into the cache."""
        batch.wait()
        with self._lock:
            self._load()
            self._land(batch.number)

    def release(self, batch: CachedBatch, *, changed: bool) -> None:
        """End the use of a batch's rows, evict rows as the policy decides, and write them back.

        ``changed`` is True if a backward pass has updated the rows. A second call does nothing.
        """
        with self._lock:
            if batch.is_released:
                return
            batch.is_released = True
            self._land(batch.number)
            used = batch.admitted
            unpinned, bounds = self._pool.unpin(used, changed=changed)
            dirty = self._pool.dirty
            leaving = [
                policy.release(
                    used.slots[used.bounds[table] : used.bounds[table + 1]],
                    unpinned[bounds[table] : bounds[table + 1]],
                )
                for table, policy in enumerate(self._policies)
            ]
            changes = [slots[dirty[slots]] for slots in leaving]
            for traffic, slots in zip(self.traffic, changes, strict=True):
                traffic.bytes_written += len(slots) * self._row_bytes
            self._write_back(np.concatenate(changes))
            self._pool.release(np.concatenate(leaving))

    def abandon(self, batch: CachedBatch) -> None:
        """Schedule the release of a batch whose autograd graph was freed without backward.

        May be called by the garbage collector.
        """
        self._abandoned.append(batch)

    def flush(self) -> None:
        """Write all changed rows to the backing store (all rows of the tables). Wait until done.

        The caller may then modify the backing store, so cached rows are reloaded before use.
        """
        with self._lock:
            self._release_abandoned()
            self._land(self._num_batches)
            for slots in _chunks(np.flatnonzero(self._pool.dirty)):
                self._write_back(slots)
                self._pool.dirty[slots] = False
            self._mover.drain()
            self._is_stale = True

    def load(self) -> None:
        """Reload cached rows after the caller has modified the full tables (backing store)."""
        with self._lock:
            self._land(self._num_batches)  # rows read before are stale
            self._is_stale = True
            self._load()

    def _load(self) -> None:
        if not self._is_stale:
            return
        self._is_stale = False
        held = (self._pool.row_of_slot >= 0) & ~self._pool.dirty
        for slots in _chunks(np.flatnonzero(held)):
            rows = self._pool.row_of_slot[slots]
            weights, state = self._mover.read(torch.from_numpy(rows)).result()
            self._fast.write(self._on_device(slots), weights, state)

    def _land(self, number: int) -> None:
        """Copy the fetched rows of all batches up to this number into the cache."""
        while self._waiting and self._waiting[0][0].number <= number:
            first, pending = self._waiting.popleft()
            weights, state = pending.result()
            self._fast.write(self._on_device(first.admitted.missing), weights, state)

    def _release_abandoned(self) -> None:
        while self._abandoned:
            self.release(self._abandoned.popleft(), changed=False)

    def _check(self, ids: Tensor, ids_per_feature: Sequence[int], tables: Sequence[int]) -> None:
        """Raise DataError for ids outside their table, also for -1, which FBGEMM accepts."""
        table_of_id = torch.tensor(tables).repeat_interleave(torch.tensor(ids_per_feature))
        num_rows = torch.from_numpy(np.diff(self._pool.first_rows))
        outside = (ids < 0) | (ids >= num_rows.index_select(0, table_of_id))
        if outside.any():
            shard = self._shards[int(table_of_id[outside][0])]
            raise DataError(
                f"table {shard.name!r}: id {int(ids[outside][0])} is outside rows 0 to "
                f"{shard.num_rows - 1} of this rank's shard. Correct the ids, or increase "
                "num_embeddings."
            )

    def _write_back(self, slots: NDArray[np.integer]) -> None:
        """Start to write rows back to the full tables. Their slots may be reused immediately."""
        if not len(slots):
            return
        rows = self._pool.row_of_slot[slots]
        weights, state = self._fast.read(self._on_device(slots))
        ready = None
        if weights.is_cuda:
            buffer, state_buffer = self._mover.buffers(len(rows))
            weights = buffer.copy_(weights, non_blocking=True)
            if state is not None and state_buffer is not None:
                state = state_buffer.copy_(state, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(self._fast.weights.device))
        self._mover.write(torch.from_numpy(rows), weights, state, ready=ready)

    def _count_batch(self, admitted: Admitted) -> None:
        unique, missing = np.diff(admitted.bounds), np.diff(admitted.missing_bounds)
        for table, traffic in enumerate(self.traffic):
            traffic.unique_rows += int(unique[table])
            traffic.misses += int(missing[table])
            traffic.hits += int(unique[table] - missing[table])
            traffic.bytes_read += int(missing[table]) * self._row_bytes

    def _on_device(self, slots: NDArray[np.integer]) -> Tensor:
        """Copy slots to the device of the cache, without waiting for a GPU."""
        device, source = self._fast.weights.device, torch.from_numpy(slots).long()
        source = source.pin_memory() if device.type == "cuda" else source
        return source.to(device, non_blocking=True)


def _split(ids: NDArray[np.integer], lengths: Sequence[int]) -> list[NDArray[np.integer]]:
    return np.split(ids, np.cumsum(lengths)[:-1]) if lengths else []


def _chunks(slots: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [slots[first : first + _CHUNK] for first in range(0, len(slots), _CHUNK)]
