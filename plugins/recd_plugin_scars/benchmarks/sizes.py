"""How much each part of ``recd bench scars`` does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recd_plugin_scars.benchmarks.cells import Workload
from recd_plugin_scars.benchmarks.file_store import FileWorkload
from recd_plugins.testing.benchmark import Size

_MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """The sizes of all parts.

    Attributes:
        cells: tables like Criteo's.
        file: the table that is larger than memory, of which a process needs 600 MiB; or None.
        steps: of the comparison by a registry.
    """

    cells: Workload
    file: FileWorkload | None
    steps: int


SIZES: Mapping[Size, Sizes] = {
    "tiny": Sizes(
        cells=Workload(scale=64, other_scale=512, num_batches=75, warmup=1, turns=1),
        file=None,
        steps=2,
    ),
    "small": Sizes(
        cells=Workload(scale=64, other_scale=64, num_batches=200, warmup=20, turns=1),
        file=FileWorkload(
            memory=704 * _MIB,
            cache=96 * _MIB,
            batch_size=1024,
            lookups=26,
            num_batches=50,
            warmup=30,
            turns=1,
        ),
        steps=8,
    ),
    "reference": Sizes(
        cells=Workload(scale=1, other_scale=8, num_batches=30, warmup=6, turns=3),
        file=FileWorkload(
            memory=2048 * _MIB,
            cache=640 * _MIB,
            batch_size=2048,
            lookups=26,
            num_batches=100,
            warmup=70,
            turns=3,
        ),
        steps=30,
    ),
}
