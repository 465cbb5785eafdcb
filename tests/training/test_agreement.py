"""Ranks that decide differently are refused at their start, with both sides named."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tests.training import agreement_cases as cases

from recd_plugins.testing.gloo import run_on_ranks

REGISTRY = """version: 1
dataset: {use: dlrm.random, options: {rows: 64, sparse: {a: 9, b: 40}}}
converter: {use: recd.ikjt}
training: {batch_size: 16, device: cpu}
model: {num_embeddings: 50, embedding_dim: 4, bottom_mlp: [4], top_mlp: [4]}
"""
#: The same trained on Parquet files.
OF_FILES = (
    "dlrm.random, options: {rows: 64, sparse: {a: 9, b: 40}}",
    "recd.session_parquet, options: {path: .}",
)
NUMBERS = range(2000)  # more rows than a profile looks at
ROWS = pa.table(
    {
        "session_id": pa.array(NUMBERS, pa.int64()),
        "ts": pa.array(NUMBERS, pa.float64()),
        "label": pa.array([number % 2 for number in NUMBERS], pa.int8()),
        **{name: [[number % 40] for number in NUMBERS] for name in "ab"},
    }
)
OF_TRAINERS = {
    cases.plan: (
        '(sharding bags): the plan, b0.sharding_type: "row_wise" on rank 0, "table_wise" on rank 1'
    ),
    cases.loader: (
        "rank 0 is at the form of the first batch of bags, rank 1 at the first "
        "batch of dedup(loader)"
    ),
}
#: Plugins that decide by their rank.
PLUGINS = '''
import torch.distributed as dist
from recd_plugins.api import Sharding, hookimpl

class Constrains(Sharding):
    """Row-wise on rank 0."""
    name = "acme.constrains"
    def constraints(self, tables):
        from torchrec.distributed.planner.types import ParameterConstraints
        kinds = ["table_wise" if dist.get_rank() else "row_wise"]
        return {table.name: ParameterConstraints(sharding_types=kinds) for table in tables}

class Rewrites(Sharding):
    """A row more on rank 1."""
    name = "acme.rewrites"
    def rewrite(self, model, tables, setting):
        names = [table.name for table in tables]
        for module in model.modules():
            for config in getattr(module, "embedding_bag_configs", list)():
                config.num_embeddings += dist.get_rank() * (config.name in names)
        return model

@hookimpl
def register_plugins():
    return [Constrains, Rewrites]
'''
#: What differs, and the entry whose plugin decided it.
BY_ENTRIES = {
    cases.constraints_by_rank: (
        'what plugins ask of the plan, acme.constrains.t_b.sharding_types: ["row_wise"] on rank 0',
        "constrains.yaml:6 sharding[0]: acme.constrains (t_b);",
    ),
    cases.rewritten_by_rank: (
        "the model's tables, bags.t_b.num_embeddings: 50 on rank 0, 51 on rank 1",
        "rewrites.yaml:6 sharding[0]: acme.rewrites (t_b);",
    ),
}
OF_RUNS = {
    cases.run: "(planning): the registry file, training.seed: 0 on rank 0, 1 on rank 1",
    cases.started_on_another_device: (
        '(starting): what training.device comes to: "cuda" on rank 0, "cpu" on rank 1'
    ),
    cases.run_where_a_file_is_missing: "(looking at the data): its rows, train.2.parquet.bytes: ",
}


def test_a_trainer_is_told_what_differs() -> None:
    for told in run_on_ranks(cases.said, 2, list(OF_TRAINERS)):
        for text, expected in zip(told, OF_TRAINERS.values(), strict=True):
            assert expected in text


def test_a_run_is_told_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "registry.yaml"
    path.write_text(REGISTRY)
    (tmp_path / "files.yaml").write_text(REGISTRY.replace(*OF_FILES))
    for folder, files in (("all", "12"), ("fewer", "1")):
        (tmp_path / folder).mkdir()
        for name in files:
            pq.write_table(ROWS, tmp_path / folder / f"{name}.parquet")
    for told in run_on_ranks(cases.said, 2, list(OF_RUNS), path):
        for text, expected in zip(told, OF_RUNS.values(), strict=True):
            assert expected in text
            assert "give all ranks one installation, one command, one registry file" in text


def test_the_entry_of_what_differs_is_named(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "acme.py").write_text(PLUGINS)
    for name in ("constrains", "rewrites"):
        entry = f"sharding: [{{use: acme.{name}, tables: [t_b]}}]\n"
        (tmp_path / f"{name}.yaml").write_text(REGISTRY + entry)
    path = tmp_path / "registry.yaml"
    for told in run_on_ranks(cases.said, 2, list(BY_ENTRIES), path):
        for text, (differs, entry) in zip(told, BY_ENTRIES.values(), strict=True):
            assert differs in text
            assert f"Entries of what differs: {tmp_path}/{entry}" in text


def test_auto_chooses_on_one_rank_for_all(tmp_path: Path) -> None:
    path = tmp_path / "registry.yaml"
    path.write_text(REGISTRY + "sharding: [{use: auto}]\n")
    for told in run_on_ranks(cases.said, 2, [cases.auto_finds_nothing], path):
        assert told == ["nothing fits here"]
    first, second = run_on_ranks(cases.chosen, 2, path)
    assert first == second
    assert first[0].startswith("auto takes ")


def test_it_counts_no_bytes_and_no_addresses() -> None:
    for num_bytes, text in run_on_ranks(cases.counted, 2):
        assert num_bytes == 0
        shown = f'"{"x" * 56}...'
        assert f"(a test): long, value: {shown} on rank 0, {shown} on rank 1." in text
