"""Batches of trainers by name, and the same rows as plain batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from tests.drop_in.matrix.modules import FEATURES, MAX_LENGTH, ROWS, Module
from tests.drop_in.trainer import forced_dedup
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recd_plugins.data.row_pipeline import lower
from recd_plugins.drop_in.dedup import Dedup
from recd_plugins.interfaces.batch import Batch as ReadBatch
from recd_plugins.interfaces.batch import ModelInput, Placement
from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor

NUM_ROWS, NUM_STEPS = 8, 3

#: Ids and weights of each row, by feature.
Rows = dict[str, list[tuple[list[int], list[float]]]]
#: Makes the features of a batch from rows, rank, step and whether the module is weighted.
Make = Callable[[Rows, int, int, bool], Any]


@dataclass
class Batch(Pipelineable):
    sparse: KeyedJaggedTensor
    lengths: dict[str, Tensor]
    labels: Tensor
    stored: ModelInput | None = None

    def to(self, device: torch.device, non_blocking: bool = False, **_: Any) -> Batch:
        if device.type == "cpu":
            return self
        stored = None if self.stored is None else self.stored.to(device, non_blocking=non_blocking)
        lengths = {name: each.to(device) for name, each in self.lengths.items()}
        return Batch(self.sparse.to(device), lengths, self.labels.to(device), stored)

    def record_stream(self, stream: Any) -> None:
        for each in (self.sparse, self.labels, self.stored, *self.lengths.values()):
            if each is not None:
                each.record_stream(stream)

    def pin_memory(self) -> Batch:
        return self


def rows(rank: int, step: int, num_rows: int = NUM_ROWS) -> Rows:
    """Return rows, half of which repeat others; some are empty."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    found: Rows = {}
    for feature in FEATURES:
        distinct = []
        for length in torch.randint(0, MAX_LENGTH, (num_rows // 2,), generator=generator).tolist():
            ids = torch.randint(ROWS, (length,), generator=generator).tolist()
            distinct.append((ids, [0.5 + (id_ % 3) / 4 for id_ in ids]))
        found[feature] = [distinct[row % max(1, num_rows // 2)] for row in range(num_rows)]
    return found


def _kjt(keys: list[str], every: Any, weighted: bool, **more: Any) -> Any:
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.tensor([id_ for ids, _ in every for id_ in ids], dtype=torch.int64),
        weights=torch.tensor([w for _, weights in every for w in weights]) if weighted else None,
        lengths=torch.tensor([len(ids) for ids, _ in every], dtype=torch.int32),
        **more,
    )


def plain(found: Rows, *, weighted: bool = False, keys: list[str] | None = None) -> Any:
    keys = keys or FEATURES
    every = [row for key in keys for row in found[key]]
    return _kjt(keys, every, weighted, stride=len(found[keys[0]]))


def _unique(found: Rows, *, weighted: bool = False) -> Any:
    every, strides, inverse = [], [], []
    for key in FEATURES:
        rows = [(tuple(ids), tuple(weights)) for ids, weights in found[key]]
        unique = list(dict.fromkeys(rows))
        inverse.append([unique.index(row) for row in rows])
        every += unique
        strides.append([len(unique)])
    indices = (FEATURES, torch.tensor(inverse))
    return _kjt(FEATURES, every, weighted, stride_per_key_per_rank=strides, inverse_indices=indices)


def _stored(found: Rows, **placed: Any) -> ModelInput:
    kjt = plain(found)
    partial = PartialInverseKeyedJaggedTensor.from_kjt(kjt)
    dense, labels = torch.zeros(kjt.stride(), 1), torch.zeros(kjt.stride())
    return lower(
        ReadBatch(dense, labels, partials=(partial,)),
        Placement(**{how: tuple(names) for how, names in placed.items()}),
    )


def batch_of(found: Rows, sparse: KeyedJaggedTensor) -> Batch:
    num_rows = len(found[FEATURES[0]])
    lengths = {name: torch.tensor([len(ids) for ids, _ in found[name]]) for name in FEATURES}
    return Batch(sparse, lengths, torch.arange(num_rows, dtype=torch.float32) / NUM_ROWS)


@dataclass(frozen=True)
class Form:
    sparse: Make
    dedup: bool = False  # the loader goes through ``dedup``
    num_rows: Callable[[int, int], int] = lambda rank, step: NUM_ROWS
    plain_for_stock: bool = True
    partial: bool = False  # an EmbeddingCollection gets stored ids of overlapping rows
    no_ids: int | None = None  # step in which no row has an id

    def rows(self, rank: int, step: int) -> Rows:
        found = rows(rank, step, self.num_rows(rank, step))
        if step == self.no_ids:
            return {name: [([], [])] * len(each) for name, each in found.items()}
        return found

    def batch(self, found: Rows, rank: int, step: int, module: Module) -> Batch:
        if self.partial and module.sequences:
            stored = _stored(found, sequence=FEATURES)
            assert stored.sequence_features is not None
            return replace(batch_of(found, stored.sequence_features), stored=stored)
        return batch_of(found, self.sparse(found, rank, step, module.weighted))


def _plain(found: Rows, _rank: int, _step: int, weighted: bool) -> Any:
    return plain(found, weighted=weighted)


def _int32(*given: Any) -> Any:
    kjt = _plain(*given)
    return KeyedJaggedTensor(kjt.keys(), kjt.values().int(), kjt.weights_or_none(), kjt.lengths())


def _keys_from_step_1(keys: list[str]) -> Make:
    return lambda found, _rank, step, weighted: plain(
        found, weighted=weighted, keys=keys if step else None
    )


def _no_rows(rank: int, step: int) -> int:
    return 0 if rank and step == LAST else NUM_ROWS


def _uneven(rank: int, step: int) -> int:
    return NUM_ROWS - 2 * rank - 2 * (step % 2)


LAST = NUM_STEPS - 1
BATCHES: dict[str, Form] = {
    "plain": Form(_plain),
    "deduplicated by dedup(loader)": Form(_plain, dedup=True),
    "VBE of the user's own": Form(lambda found, _, step, w: _unique(found, weighted=w)),
    "VBE and plain in turn": Form(
        lambda found, _, step, weighted: (_unique, plain)[step % 2](found, weighted=weighted)
    ),
    "VBE on one rank, plain on the other": Form(
        lambda found, rank, _, weighted: (_unique, plain)[rank % 2](found, weighted=weighted)
    ),
    "no row on a rank, last": Form(_plain, num_rows=_no_rows),
    "deduplicated, no row on a rank": Form(_plain, dedup=True, num_rows=_no_rows),
    "other sizes on other ranks": Form(_plain, num_rows=_uneven),
    "deduplicated, other sizes": Form(_plain, dedup=True, num_rows=_uneven),
    "without weights": Form(lambda found, *_: plain(found), plain_for_stock=False),
    "of partial IKJTs": Form(
        lambda found, *_: _stored(found, pooled=FEATURES).sparse_features, partial=True
    ),
    "no id in the last batch": Form(_plain, no_ids=LAST),
    "deduplicated, no id in the first batch": Form(_plain, dedup=True, no_ids=0),
    "int32 ids": Form(_int32, plain_for_stock=False),
    "a feature is missing later": Form(_keys_from_step_1(FEATURES[:1]), plain_for_stock=False),
    "features in another order later": Form(
        _keys_from_step_1(FEATURES[::-1]), plain_for_stock=False
    ),
}


def loader(form: Form, rank: int, module: Module, dedup: Dedup | None) -> Iterator[Batch]:
    found = (form.rows(rank, step) for step in range(NUM_STEPS))
    batches = (form.batch(each, rank, step, module) for step, each in enumerate(found))
    if not form.dedup or dedup is None:
        yield from batches
        return
    with forced_dedup():
        yield from dedup(batches)


def plain_loader(form: Form, rank: int, module: Module) -> Iterator[Batch]:
    for step in range(NUM_STEPS):
        found = form.rows(rank, step)
        yield batch_of(found, plain(found, weighted=module.weighted))
