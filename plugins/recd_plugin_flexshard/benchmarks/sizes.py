"""How much each part of ``recd bench flexshard`` does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recd_plugin_flexshard.benchmarks.one_table_plans import Scaled
from recd_plugin_flexshard.benchmarks.papercal import Workload
from recd_plugins.testing.benchmark import Size


@dataclass(frozen=True)
class Sizes:
    """The sizes of all parts.

    Attributes:
        rm2: the scaled table.
        rm2_batches: of a rank; all sides train on all of them.
        rm2_turns: timed turns of one step of each side.
        papercal: the table of sessions.
        drift: the scaled table whose popularity moves.
        phases: after each of which it does.
        retier_every: steps; a phase has twice as many.
    """

    rm2: Scaled
    rm2_batches: int
    rm2_turns: int
    papercal: Workload
    drift: Scaled
    phases: int
    retier_every: int


SIZES: Mapping[Size, Sizes] = {
    "tiny": Sizes(
        rm2=Scaled(scale=2048, embedding_dim=32, profiled=400, nodes=2),
        rm2_batches=2,
        rm2_turns=1,
        papercal=Workload(
            ("seq_0_1",), batch_size=128, num_batches=2, turns=1, profiled=2048, nodes=2
        ),
        drift=Scaled(scale=2048, embedding_dim=32, profiled=400, nodes=2),
        phases=2,
        retier_every=2,
    ),
    "small": Sizes(
        rm2=Scaled(scale=256, embedding_dim=16, profiled=1600),
        rm2_batches=8,
        rm2_turns=3,
        papercal=Workload(("seq_0_0",), batch_size=512, num_batches=2, turns=3, profiled=32_768),
        drift=Scaled(scale=512, embedding_dim=8, profiled=800),
        phases=2,
        retier_every=6,
    ),
    "reference": Sizes(
        rm2=Scaled(scale=64, embedding_dim=32, profiled=6400),
        rm2_batches=8,
        rm2_turns=9,
        papercal=Workload(("seq_0_*",), batch_size=512, num_batches=4, turns=9, profiled=65_536),
        drift=Scaled(scale=256, embedding_dim=8, profiled=1600),
        phases=4,
        retier_every=8,
    ),
}
