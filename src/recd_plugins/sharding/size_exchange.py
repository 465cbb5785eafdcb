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

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec.distributed import embedding_sharding
from torchrec.distributed.dist_data import KJTAllToAll, KJTAllToAllTensorsAwaitable, _get_recat
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.sharding.coalesced.input_dist import numbers_on

_WORD = torch.int32  # the dtype in which sizes, lengths, ids and weights are sent
_get_recat = cache(_get_recat)


def exchange_sizes_once(modules: Iterable[nn.Module]) -> None:
    """Make input dists of ``modules`` wait for ``send_sizes``, which sends all sizes at once."""
    # TorchRec copies the rows per feature of row-wise tables from pageable memory.
    embedding_sharding._fx_wrap_batch_size_per_feature = _rows_per_feature
    for module in chain.from_iterable(each.modules() for each in modules):
        for input_dist in getattr(module, "_input_dists", ()):
            if isinstance(replaced := getattr(input_dist, "_dist", None), KJTAllToAll):
                replaced.forward = partial(_Request, replaced)


def _rows_per_feature(features: KeyedJaggedTensor) -> Tensor | None:
    if not features.variable_stride_per_key():
        return None
    dtype = features.lengths().dtype
    return numbers_on(features.device(), features.stride_per_key(), dtype=dtype)[0]


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
        self._requests, self._arriving = requests, dict[_Request, _Arriving]()
        for each in requests:
            each.exchange = self
        group, kjts = requests[0].group, [each.features for each in requests]
        splits, device = tuple(each.splits for each in requests), kjts[0].device()
        strides = [stride for kjt in kjts for stride in kjt.stride_per_key()]
        known = [0] * len(strides) + strides + [kjt.stride() for kjt in kjts]
        order, places = _order(splits, device)
        starts = [0, *accumulate(strides)]  # of the rows of each key
        to_ranks = [sum(2 * split[n] + 1 for split in splits) for n in range(group.size())]
        from_ranks = [to_ranks[group.rank()]] * group.size()
        # All numbers are in one tensor, so that one copy in each direction is enough.
        sizes = [len(starts), len(order), sum(from_ranks)]
        on_host = [*starts, *(known[n] for n in order), *[0] * sizes[2]]
        numbers = numbers_on(device, on_host, dtype=_WORD)[0]
        rows, sent, received = torch.split(numbers, sizes)
        lengths = torch.cat([kjt.lengths() for kjt in kjts])
        own = torch.ops.fbgemm.segment_sum_csr(1, rows, lengths)
        sent.index_copy_(0, places, own.to(_WORD))
        self._work: Any = dist.all_to_all_single(
            received, sent, from_ranks, to_ranks, group, async_op=True
        )
        self._host, self._copied = numbers[len(starts) :], None
        if device.type == "cuda":
            self._work.wait()
            self._host = torch.empty(self._host.shape, dtype=_WORD, pin_memory=True)
            self._host.copy_(numbers[len(starts) :], non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def arriving(self) -> dict[_Request, _Arriving]:
        """Return each request's ids in flight. The first call waits for sizes and sends ids."""
        if self._arriving:
            return self._arriving
        if self._copied is not None:
            self._copied.synchronize()
        else:
            self._work.wait()
        group = self._requests[0].group
        order, _ = _order(tuple(each.splits for each in self._requests), self._host.device)
        sent, received = np.split(self._host.numpy().astype(np.int64), [len(order)])
        own, by_rank = sent[np.argsort(order)].tolist(), received.reshape(group.size(), -1)
        key = column = 0
        for each in self._requests:
            keys, count = sum(each.splits), each.splits[group.rank()]
            end = column + 2 * count + 1
            self._arriving[each] = _Arriving(each, own[key : key + keys], by_rank[:, column:end])
            key, column = key + keys, end
        work = _AllToAll(group, list(self._arriving.values()))
        for arriving in self._arriving.values():
            arriving._awaitables.append(work)
        return self._arriving


@cache
def _order(
    all_splits: tuple[tuple[int, ...], ...], device: torch.device
) -> tuple[list[int], Tensor]:
    """Return the permutation that orders sizes by destination rank.

    Unpermuted, the sizes are the ids of each key, the rows of each key and the batch sizes. Also
    returns the index at which the permutation puts the ids of each key, int64 ``[num_keys]``.
    """
    num_keys, order = sum(map(sum, all_splits)), list[int]()
    for rank in range(len(all_splits[0])):
        first = 0
        for number, splits in enumerate(all_splits):
            start = first + sum(splits[:rank])
            keys = range(start, start + splits[rank])
            order += [*keys, *(num_keys + key for key in keys), 2 * num_keys + number]
            first += sum(splits)
    return order, torch.tensor(np.argsort(order)[:num_keys], device=device)


class _Arriving(KJTAllToAllTensorsAwaitable):
    """Received ids, with the fields that TorchRec copies to the sharding context.

    ``from_ranks`` has a row per rank, with the number of ids of each key, the number of rows of
    each key, and the batch size. ``own`` is the number of ids that this rank sends per key.
    """

    def __init__(self, request: _Request, own: list[int], from_ranks: NDArray[np.int64]) -> None:
        Awaitable.__init__(self)
        features, splits = request.features, request.splits
        self._workers, rank = len(splits), request.group.rank()
        self._input, self._stagger, self._device = features, request.stagger, features.device()
        keys, first = splits[rank], sum(splits[:rank])
        self._keys = features.keys()[first : first + keys]
        ids, rows, batch = np.split(from_ranks, [keys, 2 * keys], axis=1)
        variable = features.variable_stride_per_key()
        self._stride_per_rank = None if variable else batch.flatten().tolist()
        # Permutation of received bags from rank order to key order; None without keys.
        self._recat = _get_recat(keys, len(splits), request.stagger, self._device)
        self.uneven = not variable and keys > 0 and len(set(batch.flatten())) > 1
        nodes = self._workers // request.stagger
        self.order = sorted(range(self._workers), key=lambda rank: rank % nodes)
        self.rows, self._ids_per_key = rows, ids.sum(0).tolist()
        strides, starts = features.stride_per_key(), [0, *accumulate(splits)]
        rows_to, ids_to = (
            [sum(sizes[a:b]) for a, b in pairwise(starts)] for sizes in (strides, own)
        )
        self._input_splits = {"values": ids_to}
        self._output_splits = {"values": ids.sum(1).tolist()}
        self.tensors = [
            _Tensor(features.lengths(), rows_to, rows),
            _Tensor(features.values(), ids_to, ids),
        ]
        if (weights := features.weights_or_none()) is not None:
            self.tensors.append(_Tensor(weights.detach(), ids_to, ids))
        self._input_tensors, self._awaitables = list[Tensor](), list[Any]()

    def _wait_impl(self) -> KeyedJaggedTensor:
        for work in self._awaitables:
            work.wait()
        lengths, values, *weights = (each.received for each in self.tensors)
        strides: Any = self.rows[self.order].T.tolist()
        variable = self._stride_per_rank is None
        return KeyedJaggedTensor(
            keys=self._keys,
            values=values,
            weights=weights[0] if weights else None,
            lengths=lengths,
            stride=None if self._stride_per_rank is None else sum(self._stride_per_rank),
            stride_per_key_per_rank=(strides or torch.zeros(0, 1)) if variable else None,
            length_per_key=self._ids_per_key,
        )


class _Tensor:
    """A one-dimensional tensor with elements of 4 or 8 bytes, and its sizes in words.

    ``from_ranks`` is the number of elements to receive per rank and key.
    """

    def __init__(self, sent: Tensor, to_ranks: list[int], from_ranks: NDArray[np.int64]) -> None:
        self.received = sent
        words = sent.element_size() // _WORD.itemsize
        self.parts = torch.split(sent.contiguous().view(_WORD), [words * n for n in to_ranks])
        self.from_ranks = words * from_ranks


class _AllToAll:
    """Asynchronous all-to-all of all tensors of a batch, with ``wait`` as in ``dist.Work``.

    One gather sorts the received words by tensor, key and rank.
    """

    def __init__(self, group: dist.ProcessGroup, requests: Sequence[_Arriving]) -> None:
        pairs = [(tensor, each.order) for each in requests for tensor in each.tensors]
        # Tensors with 8 bytes per element are first, so that all tensors are aligned.
        pairs.sort(key=lambda pair: -pair[0].received.element_size())
        self._tensors = [tensor for tensor, _ in pairs]
        to_ranks = list(zip(*(tensor.parts for tensor in self._tensors), strict=True))
        self._sent = torch.cat(list(chain.from_iterable(to_ranks)))
        sizes = np.concatenate([tensor.from_ranks for tensor in self._tensors], axis=1)
        self._arrived = self._sent.new_empty(int(sizes.sum()))
        self._work: Any = dist.all_to_all_single(
            self._arrived,
            self._sent,
            output_split_sizes=sizes.sum(1).tolist(),
            input_split_sizes=[sum(map(len, parts)) for parts in to_ranks],
            group=group,
            async_op=True,
        )
        ends = np.cumsum([tensor.from_ranks.shape[1] for tensor in self._tensors])
        of_tensors = np.split(_segments(sizes), ends[:-1], axis=2)
        segments = [
            _by_key(each, order) for each, (_, order) in zip(of_tensors, pairs, strict=True)
        ]
        uneven = [each for each in requests if each.uneven]
        bags = [_by_key(_segments(each.rows), each.order) for each in uneven]
        words = np.concatenate(segments, axis=1)
        self._index, *recats = _positions(self._arrived.device, words, *bags)
        for each, recat in zip(uneven, recats, strict=True):
            each._recat = recat

    def wait(self) -> None:
        if not self._tensors:
            return
        self._work.wait()
        words = self._arrived.index_select(0, self._index)
        totals = [int(tensor.from_ranks.sum()) for tensor in self._tensors]
        for tensor, received in zip(self._tensors, torch.split(words, totals), strict=True):
            tensor.received = received.view(tensor.received.dtype)
        self._tensors = []
        del self._sent, self._arrived, self._index


def _segments(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the starts and the sizes of adjacent segments, ``[2, *sizes.shape]``."""
    return np.stack([(np.cumsum(sizes) - sizes.ravel()).reshape(sizes.shape), sizes])


def _by_key(segments: NDArray[np.int64], order: list[int]) -> NDArray[np.int64]:
    """Sort segments ``[2, ranks, keys]`` by key, and by rank in ``order``."""
    return segments[:, order].transpose(0, 2, 1).reshape(2, -1)


def _positions(device: torch.device, *all_segments: NDArray[np.int64]) -> Sequence[Tensor]:
    """Return the concatenated index ranges of each array of segments, int32."""
    starts, sizes = np.concatenate(all_segments, axis=1)
    totals = [int(segments[1].sum()) for segments in all_segments]
    if not sum(totals):
        return [torch.empty(0, dtype=_WORD, device=device) for _ in totals]
    numbers = [range(len(starts) + 1), [*starts, 0], [0, *np.cumsum(sizes)]]
    which, inputs, outputs = numbers_on(device, *numbers, dtype=_WORD)
    expand = torch.ops.fbgemm.expand_into_jagged_permute
    return torch.split(expand(which[:-1], inputs, outputs, sum(totals)), totals)
