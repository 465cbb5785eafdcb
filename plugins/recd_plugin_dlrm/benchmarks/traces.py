"""How fast traces are profiled and drawn on one core, and how well LRU hit rates are kept.

The DLRM paper's Algorithms 1 and 2, with p0 as it is and raised as `recd trace generate` does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recd_plugin_dlrm.random_kernels import zipf_ids
from recd_plugin_dlrm.trace.distances import profile_ids
from recd_plugin_dlrm.trace.generator import TraceGenerator
from recd_plugin_dlrm.trace.least_new import generator_of, worst_difference
from recd_plugin_dlrm.trace.table_trace import TableTrace, total_variation
from recd_plugins.api import Dataset
from recd_plugins.api.registry import installed_plugin
from recd_plugins.testing.benchmark import (
    Detail,
    Figure,
    Findings,
    Size,
    movielens,
    processor_seconds,
)

SUMMARY = "seconds to profile and draw traces, and LRU hit rates of synthetic ones (DLRM paper)"

_PAPERCAL = ("item_0", "usr_0", "usr_3", "seq_0_0")
_EXPONENT, _IDS = 1.05, 10_000_000
_SEEDS = 3


@dataclass(frozen=True)
class _Kept:
    """How well drawn traces of one original keep its hit rates."""

    name: str
    profile: TableTrace
    own: float
    raised: list[float]
    new_share: float
    variation: float


def workload(size: Size) -> str:
    """The input in words."""
    return (
        f"{_accesses(size):,} accesses to {_IDS:,} ids by Zipf's law with exponent {_EXPONENT}, "
        f"one thread; {_rows(size):,} rows of PAPERCAL by time; 100,000 uniform ids of 100; "
        f"MovieLens-100K by time; {_SEEDS} seeds"
    )


def run(size: Size) -> Findings:
    """Measure."""
    ids = _zipf(_accesses(size))
    warm = generator_of(profile_ids(ids[:1000]), 1000, 0, None)
    warm.draw(1000)
    profiled, drawn = zip(*(_times(ids, seed) for seed in range(_SEEDS)), strict=True)
    both = [sum(pair) for pair in zip(profiled, drawn, strict=True)]
    kept = [_kept(name, each) for name, each in _traces(size, ids)]
    figures = [
        Figure.of("profile_and_draw_seconds", both, unit="s", better="lower", goal=60),
        Figure.of("profile_seconds", profiled, unit="s", better="lower"),
        Figure.of("draw_seconds", drawn, unit="s", better="lower"),
        *(
            Figure.of(
                f"worst_difference_{each.name}",
                [100 * difference for difference in each.raised],
                unit="points",
                better="lower",
                goal=1,
            )
            for each in kept
        ),
    ]
    notes = []
    if movielens() is None:
        notes.append("MovieLens-100K is left out: its path goes into RECD_MOVIELENS")
    return Findings(figures, [_detail(kept)], notes)


def _times(ids: NDArray[np.int64], seed: int) -> tuple[float, float]:
    """Processor seconds to profile a trace, and to draw one as long."""
    found: list[TableTrace] = []
    profiling = processor_seconds(lambda each: found.append(profile_ids(each)), ids)
    (profile,) = found
    drawing = processor_seconds(
        lambda each: generator_of(each, len(ids), seed, None).draw(len(ids)), profile
    )
    return profiling, drawing


def _traces(size: Size, zipf: NDArray[np.int64]) -> Iterator[tuple[str, NDArray[np.int64]]]:
    yield "zipf", zipf
    yield "uniform", np.random.default_rng(0).integers(1, 101, 100_000)
    with tempfile.TemporaryDirectory() as folder:
        table = {
            "path": f"{folder}/table",
            "sparse": list(_PAPERCAL),
            "generate": {"rows": _rows(size), "layout": "stream"},
        }
        read = _columns("recd.session_parquet", table, _PAPERCAL)
    yield from ((f"papercal_{name}", read[name]) for name in _PAPERCAL)
    path = movielens()
    if path is not None:
        log = {"path": path, "order": "time", "test_fraction": 0, "history": 1, "prefetch": 0}
        names = ("item_id", "user_id")
        read = _columns("recd.interactions", log, names)
        yield from ((f"movielens_{name}", read[name]) for name in names)


def _columns(
    use: str, options: dict[str, Any], names: Sequence[str]
) -> dict[str, NDArray[np.int64]]:
    """The ids of features of a dataset's training split, in its order."""
    dataset = installed_plugin("dataset", use, options)
    assert isinstance(dataset, Dataset)
    dataset.prepare()
    batches = [rows.data for rows in dataset.scan("train")]
    return {
        name: np.concatenate([np.asarray(batch.column(name).flatten()) for batch in batches])
        for name in names
    }


def _kept(name: str, ids: NDArray[np.int64]) -> _Kept:
    profile = profile_ids(ids)
    own = TraceGenerator(profile)
    own.draw(profile.accesses)
    raised = [generator_of(profile, profile.accesses, seed, None) for seed in range(_SEEDS)]
    for each in raised:
        each.draw(profile.accesses)
    return _Kept(
        name,
        profile,
        worst_difference(profile, own.counts),
        [worst_difference(profile, each.counts) for each in raised],
        raised[0].new_share,
        total_variation(profile.counts, raised[0].counts),
    )


def _detail(kept: list[_Kept]) -> Detail:
    return Detail(
        "largest difference of LRU hit rates at caches of 1 % to 50 % of the ids, in points",
        ["trace", "accesses", "ids", "p0", "with p0", "raised to", "then", "total variation"],
        [
            [
                each.name,
                each.profile.accesses,
                len(each.profile.ids),
                each.profile.new_share,
                100 * each.own,
                each.new_share,
                100 * each.raised[0],
                each.variation,
            ]
            for each in kept
        ],
    )


def _zipf(accesses: int) -> NDArray[np.int64]:
    return zipf_ids(0, 0, np.array([0, accesses], np.int32), _IDS, _EXPONENT)


def _accesses(size: Size) -> int:
    return {"tiny": 20_000, "small": 1_000_000, "reference": 10_000_000}[size]


def _rows(size: Size) -> int:
    return {"tiny": 256, "small": 8192, "reference": 65_536}[size]
