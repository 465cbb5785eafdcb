"""How many gradients of sequences' rows differ, which is how many are sent."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from recd_plugins.distributed.gradient_dedup import all_are_sent
from recd_plugins.interfaces import Setting, Table
from recd_plugins.registry import RunConfig
from recd_plugins.values.batch import Batch
from recd_plugins.values.data_profile import DataProfile, DistinctGradients
from recd_plugins.values.stage_costs import StageCosts

# Of gradients that are sent once: 340 kB of a step of PAPERCAL were spared in 2.7 ms by four ranks
# on two processors, where links of 200 Mbit/s take 14 ms for them and such of 1 Gbit/s as long.
_SECONDS_TO_SPARE_A_BYTE = 1e-8
# So many ids are counted, in whole batches: their share differs little.
_MOST_IDS = 200_000
# Of a scalar in 16 bits; less than it is int8 alone.
_HALF_BYTES = 2
_OWNERS = (1, 2, 4, 8, 32, 128)
_KEPT = (0.1, 0.25, 0.5, 0.75, 1.0)

_Ids = NDArray[np.int64]
# Of rows whose gradients are equal one number, which others do not have.
_Marks = NDArray[np.uint64]


def equal_gradients_pay(costs: StageCosts | None) -> bool:
    """Whether links take longer for a byte of gradients than ranks to spare it.

    Args:
        costs: that were measured; where none were they are taken to pay.
    """
    return costs is None or costs.all_to_all.bytes_across_nodes >= _SECONDS_TO_SPARE_A_BYTE


def as_run_sends(profile: DataProfile, costs: StageCosts | None) -> DataProfile:
    """The features as ``recd run`` sends them: equal gradients once where that pays.

    Args:
        profile: with equal gradients known.
        costs: as ``equal_gradients_pay``.
    """
    return profile if equal_gradients_pay(costs) else replace(profile, gradients={})


def gradients_sent_once(setting: Setting) -> Mapping[str, DistinctGradients]:
    """How many gradients differ of the tables whose equal ones a run sends once, by name.

    Args:
        setting: of the run; empty where it sends all gradients.
    """
    by_gloo, int8 = setting.device_type == "cpu", setting.wire_bytes < _HALF_BYTES
    if not by_gloo or int8 or setting.nodes == 1 or all_are_sent():
        return {}
    costs = setting.costs if setting.measured else None
    return as_run_sends(setting.data.profile(), costs).gradients


def pooled_alike(registry: RunConfig) -> set[str]:
    """The sparse features whose pooling gives all rows of a sequence the same gradient."""
    alike = set()
    for feature in registry.dataset.schema().sparse:
        plugins = [entry.plugin for entry in registry.pooling if entry.matches(feature)]
        if plugins and plugins[0].equal_gradients:
            alike.add(feature)
    return alike


def measure_gradients(
    batches: Sequence[Batch], tables: Sequence[Table], alike: Collection[str]
) -> dict[str, DistinctGradients]:
    """The share of distinct gradients of sequence tables, by name.

    Args:
        batches: of as many rows each.
        tables: of which those count that no feature but ``alike`` reads.
        alike: features of sequences whose rows get the same gradient, and whose ids are rows of
            their tables.
    """
    chosen = [t for t in tables if not t.pooled and t.features and set(t.features) <= set(alike)]
    if not chosen:
        return {}
    read = [_positions(batch, alike) for batch in batches]
    found = {}
    for table in chosen:
        of_batches = [
            (np.concatenate(ids), np.concatenate(marks))
            for each in read
            if (parts := [each[name] for name in table.features if name in each])
            for ids, marks in [zip(*parts, strict=True)]
        ]
        if not any(len(ids) for ids, _ in of_batches):
            continue
        num_ids = accumulate((len(ids) for ids, _ in of_batches), initial=0)
        counted = [each for each, n in zip(of_batches, num_ids, strict=False) if n < _MOST_IDS]
        order = _from_least_read([ids for ids, _ in of_batches])
        found[table.name] = DistinctGradients(
            _OWNERS,
            _KEPT,
            _shares([_summed(*each) for each in counted], order, table.num_embeddings),
            _shares(counted, order, table.num_embeddings),
        )
    return found


def _positions(batch: Batch, features: Collection[str]) -> dict[str, tuple[_Ids, _Marks]]:
    """Ids as they are stored, and of the rows that have each of them a mark, by feature."""
    return {name: (ids, marks) for name, ids, marks in _stored(batch) if name in features}


def _stored(batch: Batch) -> Iterator[tuple[str, _Ids, _Marks]]:
    jagged = {} if batch.kjt is None else batch.kjt.to_dict()
    for ikjt in batch.ikjts:
        jagged |= ikjt.to_unique_kjt().to_dict()
    for name, rows in jagged.items():
        lengths = rows.lengths().numpy()
        yield name, rows.values().numpy(), np.repeat(_marks(name, len(lengths)), lengths)
    for partial in batch.partials:
        for name, values, offsets, lengths in partial.split():
            starts, marks = offsets.numpy().astype(np.int64), _marks(name, len(offsets))
            change = np.zeros(len(values) + 1, np.uint64)
            np.add.at(change, starts, marks)
            np.subtract.at(change, starts + lengths.numpy(), marks)
            yield name, values.numpy(), np.cumsum(change)[:-1]


def _marks(feature: str, num_rows: int) -> _Marks:
    """Of each row: random, so that sums of different ones differ, and always the same."""
    drawn = np.random.default_rng(list(feature.encode()))
    return drawn.integers(1 << 63, size=num_rows, dtype=np.uint64)


def _summed(ids: _Ids, marks: _Marks) -> tuple[_Ids, _Marks]:
    """Each id once, and the sum of its marks."""
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    first = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]]) if len(ids) else order
    return ids[first], np.add.reduceat(marks[order], first) if len(ids) else marks


def _from_least_read(batches: Sequence[_Ids]) -> tuple[_Ids, _Ids]:
    """The rows that are read, ascending, and the place of each, by how often it is read."""
    rows, counts = np.unique(np.concatenate(batches), return_counts=True)
    places = np.empty(len(rows), np.int64)
    places[np.argsort(counts, kind="stable")] = np.arange(len(rows))
    return rows, places


def _shares(
    batches: Sequence[tuple[_Ids, _Marks]], order: tuple[_Ids, _Ids], num_rows: int
) -> tuple[tuple[float, ...], ...]:
    ids = np.concatenate([ids for ids, _ in batches])
    batch = np.repeat(np.arange(len(batches)), [len(ids) for ids, _ in batches])
    marks = np.concatenate([marks for _, marks in batches])
    places = order[1][np.searchsorted(order[0], ids)]
    shares = []
    for kept in _KEPT:
        chosen = places <= np.quantile(places, kept) if len(ids) else places > 0
        shares.append(
            tuple(
                _share(marks[chosen], batch[chosen] * owners + ids[chosen] * owners // num_rows)
                for owners in _OWNERS
            )
        )
    return tuple(shares)


def _share(marks: _Marks, places: _Ids) -> float:
    """Distinct marks of each place, of all."""
    if not len(marks):
        return 1.0
    order = np.lexsort((marks, places))
    marks, places = marks[order], places[order]
    differs = (marks[1:] != marks[:-1]) | (places[1:] != places[:-1])
    return (1 + int(differs.sum())) / len(marks)
