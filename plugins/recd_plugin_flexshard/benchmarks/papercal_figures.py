"""PAPERCAL's sequences: what tiers and deduplication save, apart and together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recd_plugin_flexshard.benchmarks.one_table_ranks import all_to_all_bytes
from recd_plugin_flexshard.benchmarks.papercal import (
    JOINT,
    LEAST_TIME,
    STOCK,
    Workload,
    write_registries,
)
from recd_plugin_flexshard.benchmarks.papercal_ranks import Job, Trained, measure
from recd_plugins.api.distributed import Ranks
from recd_plugins.testing.benchmark import Detail, Figure


@dataclass(frozen=True)
class Papercal:
    """What came of the sides, by name."""

    trained: Mapping[str, Trained]

    def reduction(self, side: str) -> float:
        """Share of the bytes of stock row-wise's all-to-all that are saved."""
        stock = all_to_all_bytes(self.trained[STOCK].sent)
        return 1 - all_to_all_bytes(self.trained[side].sent) / stock

    def times(self, side: str) -> list[float]:
        """Seconds of a step over those of stock row-wise, by turn."""
        pairs = zip(self.trained[side].seconds, self.trained[STOCK].seconds, strict=True)
        return [ours / stock for ours, stock in pairs]

    def figures(self) -> list[Figure]:
        """The figures of joint plans on deduplicated batches."""
        return [
            Figure.of(
                "joint_a2a_reduction",
                [self.reduction(JOINT)],
                unit="share",
                better="higher",
                goal=0.94,
            ),
            Figure.of(
                "joint_a2a_reduction_least_time",
                [self.reduction(LEAST_TIME)],
                unit="share",
                better="higher",
            ),
            Figure.of(
                "joint_step_time_over_row_wise",
                self.times(JOINT),
                unit="ratio",
                better="lower",
                goal=1,
            ),
            Figure.of(
                "joint_prediction_error",
                [abs(self.reduction(JOINT) - (self.trained[JOINT].predicted or 0))],
                unit="share",
                better="lower",
            ),
        ]

    @property
    def loss_max_abs_diff(self) -> float:
        """Between stock row-wise and any side."""
        losses = np.array([trained.losses for trained in self.trained.values()])
        return float(np.abs(losses - losses[0]).max())

    def details(self) -> list[Detail]:
        """What each part gives."""
        rows: list[list[str | float]] = [
            [
                name,
                f"{trained.hot:,}",
                f"{trained.flex:,}",
                trained.ids,
                all_to_all_bytes(trained.sent) / 1e6,
                (sum(trained.sent.values()) - all_to_all_bytes(trained.sent)) / 1e6,
                "" if trained.predicted is None else f"{trained.predicted:.1%}",
                f"{self.reduction(name):.1%}",
                f"{np.median(self.times(name)):.2f}",
            ]
            for name, trained in self.trained.items()
        ]
        return [
            Detail(
                "joint: PAPERCAL's sequences, by rank and step",
                [
                    "",
                    "hot rows",
                    "flex rows",
                    "ids",
                    "a2a, MB",
                    "other, MB",
                    "predicted",
                    "saved",
                    "step time",
                ],
                rows,
            )
        ]


def measure_papercal(ranks: Ranks, workload: Workload, folder: Path) -> Papercal:
    """Train every side on the same rows, in turns."""
    job = Job(write_registries(folder, workload), workload.num_batches, workload.turns)
    return Papercal(ranks.run(measure, job)[0])
