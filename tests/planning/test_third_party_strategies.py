"""A section of a plugin's strategy is reported."""

from __future__ import annotations

from pathlib import Path

from recd_plugins.training.session import session

COUNTED = '''
"""acme.counted: counts the bytes of the all-to-alls of its tables, whatever their sharding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recd_plugins.api import (
    PlanContext,
    Section,
    Sharding,
    Table,
    TableStrategy,
    TrainedRun,
    hookimpl,
)


class Sent(Section):
    """Bytes of a step of all ranks, by channel."""

    name = "acme_sent"

    def __init__(self, sent: Mapping[str, float]) -> None:
        self._sent = sent

    def as_json(self) -> Mapping[str, float]:
        return self._sent

    def shown(self, run: str) -> Sequence[str]:
        return [
            f"{run} {name}: {sent:,.0f} bytes a step".strip() for name, sent in self._sent.items()
        ]


class CountedStrategy(TableStrategy):
    """Nothing but a count."""

    def channels(self, model):
        import torch.distributed as dist

        return {(dist.group.WORLD.group_name, "all_to_all"): "acme_all_to_all"}

    @classmethod
    def sections(cls, parts: Sequence[CountedStrategy], run: TrainedRun) -> Sequence[Section]:
        return [] if run.sent is None else [Sent(run.sent)]


class Counted(Sharding):
    """Leaves its tables to the planner, and counts what is sent."""

    name = "acme.counted"

    def strategy(self, tables: Sequence[Table], context: PlanContext) -> CountedStrategy | None:
        return CountedStrategy() if tables else None


@hookimpl
def register_shardings() -> Sequence[type[Sharding]]:
    return [Counted]
'''
REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: "{folder}"
    sparse: [usr_0, "seq_0_*"]
    generate: {{rows: 2048, row_group_rows: 256}}
converter: {{use: recd.ikjt}}
preprocessing: [{{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 200}}}}]
pooling: [{{use: recd.mean, features: ["seq_*"]}}]
sharding: [{{use: acme.counted, tables: ["t_seq_*"]}}]
model: {{embedding_dim: 8, num_embeddings: 200, bottom_mlp: [8], top_mlp: [8]}}
training: {{batch_size: 64, ranks: 2, steps: 8, device: cpu, evaluate: false}}
"""


def test_its_section_is_reported(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "acme_counted.py").write_text(COUNTED)
    path = tmp_path / "registry.yaml"
    path.write_text(REGISTRY.format(folder=tmp_path / "table"))
    with session(path, plugins_dir=tmp_path / "plugins", overrides={}) as trainer:
        result = trainer.train("plugins")
    sent = result.as_json()["acme_sent"]["acme_all_to_all"]
    assert 0 < sent <= result.collective_bytes["all_to_all"]
    (shown,) = result.sections["acme_sent"].shown("")
    assert shown == f"acme_all_to_all: {sent:,.0f} bytes a step"
