"""Input dist of a train pipeline that exchanges sizes once per batch, and ids once per batch.

TorchRec (1.6 to 1.9) copies sizes to a GPU in several tensors, reads them back for debugging, and
reads the sizes of received ids again, which makes the host wait about 20 times per batch. It also
sends each tensor of each module in its own collective. Over gloo, a short collective takes as long
as a long one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.dist_data import KJTAllToAll, KJTAllToAllTensorsAwaitable, _get_recat
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, _permute_tensor_by_segments

from recd_plugins.sharding.coalesced.input_dist import numbers_on

_WORD = torch.int32  # the dtype in which lengths and ids are sent
_get_recat = cache(_get_recat)


def exchange_sizes_once(modules: Iterable[nn.Module]) -> None:
    """Make input dists of ``modules`` wait for ``send_sizes``, which sends all sizes at once."""
    for module in chain.from_iterable(each.modules() for each in modules):
        for input_dist in getattr(module, "_input_dists", ()):
            if isinstance(replaced := getattr(input_dist, "_dist", None), KJTAllToAll):
                replaced.forward = partial(_Request, replaced)


def send_sizes(requests: Iterable[Any]) -> None:
    """Send the sizes of a batch. ``requests`` are the results of ``input_dist`` of all modules."""
    by_group: dict[dist.ProcessGroup, list[_Request]] = {}
    for each in chain.from_iterable(getattr(some, "awaitables", ()) for some in requests):
        if isinstance(each, _Request) and each.exchange is None:
            by_group.setdefault(each.group, []).append(each)
    for of_group in by_group.values():
        _Exchange(of_group)


class _Request(Awaitable[KJTAllToAllTensorsAwaitable]):
    """Features that a module sends for the tables of one sharding type."""

    def __init__(self, replaced: KJTAllToAll, features: KeyedJaggedTensor) -> None:
        super().__init__()
        self.group, self.splits = replaced._pg, tuple(replaced._splits)
        self.stagger, self.features = replaced._stagger, features
        self.exchange: _Exchange | None = None

    def _wait_impl(self) -> KJTAllToAllTensorsAwaitable:
        return (self.exchange or _Exchange([self])).arriving()[self]


class _Exchange:
    """Exchange of the sizes, and then the ids, of all requests of a batch in a process group.

    For each request, a rank receives the number of ids per key, the number of rows per key, and the
    batch size.
    """

    def __init__(self, requests: Sequence[_Request]) -> None:
        self._requests, group = requests, requests[0].group
        self._rank, self._arriving = group.rank(), dict[_Request, _Arriving]()
        for each in requests:
            each.exchange = self
        all_splits = tuple(each.splits for each in requests)
        kjts = [each.features for each in requests]
        device = kjts[0].device()
        strides = [stride for kjt in kjts for stride in kjt.stride_per_key()]
        known = numbers_on(device, strides + [kjt.stride() for kjt in kjts])[0]
        num_keys = len(strides)
        rows = torch.ops.fbgemm.asynchronous_complete_cumsum(known[:num_keys])
        lengths = torch.cat([kjt.lengths() for kjt in kjts]).long()
        own = torch.ops.fbgemm.segment_sum_csr(1, rows, lengths)
        sent = torch.cat([own, known]).index_select(0, _order(all_splits, device))
        to_ranks = [
            sum(2 * splits[rank] + 1 for splits in all_splits) for rank in range(group.size())
        ]
        from_ranks = [to_ranks[self._rank]] * group.size()
        received = sent.new_empty(sum(from_ranks))
        work: Any = dist.all_to_all_single(
            received, sent, from_ranks, to_ranks, group, async_op=True
        )
        work.wait()
        self._num_keys, self._received = num_keys, received.view(group.size(), -1)
        found = torch.cat([own, received])
        self._host = torch.empty(found.shape, dtype=found.dtype, pin_memory=device.type == "cuda")
        self._host.copy_(found, non_blocking=True)
        self._copied = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def arriving(self) -> dict[_Request, _Arriving]:
        """Return each request's ids in flight. The first call waits for sizes and sends ids."""
        if self._arriving:
            return self._arriving
        if self._copied is not None:
            self._copied.synchronize()
        numbers = self._host.tolist()
        own, size = numbers[: self._num_keys], self._received.shape[1]
        by_rank = [numbers[n : n + size] for n in range(len(own), len(numbers), size)]
        key = column = 0
        for each in self._requests:
            keys, count = sum(each.splits), each.splits[self._rank]
            end = column + 2 * count + 1
            self._arriving[each] = _Arriving(
                each,
                own[key : key + keys],
                [row[column:end] for row in by_rank],
                self._received[:, column:end],
            )
            key, column = key + keys, end
        work = _AllToAll(
            self._requests[0].group,
            [tensor for each in self._arriving.values() for tensor in each.integers],
        )
        for each in self._arriving.values():
            each._awaitables.append(work)
        return self._arriving


@cache
def _order(all_splits: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return the permutation that orders sizes by destination rank, int64 ``[num_sizes]``."""
    num_keys, order = sum(map(sum, all_splits)), []
    for rank in range(len(all_splits[0])):
        first = 0
        for number, splits in enumerate(all_splits):
            start = first + sum(splits[:rank])
            keys = range(start, start + splits[rank])
            order += [*keys, *(num_keys + key for key in keys), 2 * num_keys + number]
            first += sum(splits)
    return torch.tensor(order, device=device)


class _Arriving(KJTAllToAllTensorsAwaitable):
    """Received ids, with the fields that TorchRec copies to the sharding context.

    ``from_ranks`` and the device tensor ``sizes`` have a row per rank, with the number of ids of
    each key, the number of rows of each key, and the batch size.
    """

    def __init__(
        self, request: _Request, own: list[int], from_ranks: list[list[int]], sizes: Tensor
    ) -> None:
        Awaitable.__init__(self)
        features, splits, group = request.features, request.splits, request.group
        rank, keys = group.rank(), splits[group.rank()]
        self._workers, self._input, self._stagger = group.size(), features, request.stagger
        self._ids = [row[:keys] for row in from_ranks]
        self._rows = [row[keys : 2 * keys] for row in from_ranks]
        self._batch = [row[-1] for row in from_ranks]
        self._sizes, first = sizes, sum(splits[:rank])
        self._keys = features.keys()[first : first + keys]
        self._device = features.device()
        self._plain_recat = _get_recat(keys, len(splits), request.stagger, self._device)
        variable = features.variable_stride_per_key()
        self._stride_per_rank = None if variable else self._batch
        starts = [0, *accumulate(splits)]
        strides = features.stride_per_key()
        sent = [(sum(strides[a:b]), sum(own[a:b])) for a, b in pairwise(starts)]
        received = [(sum(rows), sum(ids)) for rows, ids in zip(self._rows, self._ids, strict=True)]
        (rows_to, ids_to), (rows_from, ids_from) = (
            zip(*sent, strict=True),
            zip(*received, strict=True),
        )
        self._input_splits = {"values": list(ids_to)}
        self._output_splits = {"values": list(ids_from)}
        self.integers = [
            _Tensor(features.lengths(), rows_to, rows_from),
            _Tensor(features.values(), ids_to, ids_from),
        ]
        self._input_tensors, self._awaitables = list[Tensor](), list[Any]()
        self._weights = features.weights_or_none()
        if (weights := self._weights) is not None:
            self._weights = weights.new_empty(sum(ids_from))
            self._awaitables.append(
                dist.all_to_all_single(
                    self._weights, weights, list(ids_from), list(ids_to), group, async_op=True
                )
            )

    @property
    def _recat(self) -> Tensor | None:
        """Permutation of received bags from rank order to key order; None without keys."""
        recat = self._plain_recat
        if recat is None or self._stride_per_rank is None or len(set(self._batch)) == 1:
            return recat
        rows = self._segments(1).int()
        starts = torch.ops.fbgemm.asynchronous_complete_cumsum
        return torch.ops.fbgemm.expand_into_jagged_permute(
            recat, starts(rows), starts(rows.index_select(0, recat)), sum(map(sum, self._rows))
        )

    def _segments(self, kind: int) -> Tensor:
        keys = len(self._keys)
        return self._sizes[:, kind * keys : (kind + 1) * keys].flatten()

    def _wait_impl(self) -> KeyedJaggedTensor:
        for work in self._awaitables:
            work.wait()
        lengths, values = (each.received for each in self.integers)
        weights, recat = self._weights, self._plain_recat
        if recat is not None:
            lengths, _ = _permute_tensor_by_segments(
                lengths, self._segments(1), recat, None, len(lengths)
            )
            values, weights = _permute_tensor_by_segments(
                values, self._segments(0), recat, weights, len(values)
            )
        ranks = range(self._workers)
        order = sorted(ranks, key=lambda rank: rank % (self._workers // self._stagger))
        strides: Any = [[self._rows[rank][key] for rank in order] for key in range(len(self._keys))]
        variable = self._stride_per_rank is None
        return KeyedJaggedTensor(
            keys=self._keys,
            values=values,
            weights=weights,
            lengths=lengths,
            stride=None if variable else sum(self._batch),
            stride_per_key_per_rank=(strides or torch.zeros(0, 1)) if variable else None,
            length_per_key=[sum(ids) for ids in zip(*self._ids, strict=True)],
        )


class _Tensor:
    """A one-dimensional tensor of integers with its split sizes per rank."""

    def __init__(self, sent: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> None:
        self.received = sent.new_empty(sum(from_ranks))
        words = sent.element_size() // _WORD.itemsize
        self.parts = torch.split(sent.contiguous().view(_WORD), [words * n for n in to_ranks])
        self.from_ranks = [words * n for n in from_ranks]


class _AllToAll:
    """Asynchronous all-to-all of several tensors, with ``wait`` as in ``dist.Work``."""

    def __init__(self, group: dist.ProcessGroup, tensors: Sequence[_Tensor]) -> None:
        to_ranks = list(zip(*(tensor.parts for tensor in tensors), strict=True))
        from_ranks = list(zip(*(tensor.from_ranks for tensor in tensors), strict=True))
        self._sent = torch.cat(list(chain.from_iterable(to_ranks)))
        self._sizes = list(chain.from_iterable(from_ranks))
        self._arrived = self._sent.new_empty(sum(self._sizes))
        self._missing = [tensor.received for tensor in tensors]
        self._work: Any = dist.all_to_all_single(
            self._arrived,
            self._sent,
            output_split_sizes=[sum(sizes) for sizes in from_ranks],
            input_split_sizes=[sum(map(len, parts)) for parts in to_ranks],
            group=group,
            async_op=True,
        )

    def wait(self) -> None:
        self._work.wait()
        parts = torch.split(self._arrived, self._sizes)
        for number, tensor in enumerate(self._missing):
            torch.cat(parts[number :: len(self._missing)], out=tensor.view(_WORD))
        self._missing = []
