"""A published model scores like the checkpoint of the run that publishes it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import settings
from tests.training.test_evaluation import write_table

from recd_plugin_runs.encode import Encoder
from recd_plugin_runs.tests import predict_cases as cases
from recd_plugins.runtime.files import read_note, write_note
from recd_plugins.serving import LiveModel
from recd_plugins.testing.gloo import run_on_ranks

REGISTRY = """
version: 1
dataset: {{use: recd.session_parquet, options: {{path: {folder}/train, test_path: {folder}/test}}}}
converter: {{use: recd.ikjt, options: {{user_features: []}}}}
pooling: [{{use: recd.mean, features: [tags]}}]
{sections}
callbacks:
  - {{use: runs.publish, options: {{folder: {folder}/live, every: 2, base_every: 2, keep: 9}}}}
model: {{embedding_dim: 8, num_embeddings: 128, bottom_mlp: [16], top_mlp: [32], tables: {{t_item: {{num_embeddings: {rows}}}}}}}
training: {{batch_size: 8, ranks: 2, steps: {steps}, epochs: 9, device: cpu, learning_rate: 0.05, evaluate: false, checkpoint: {{path: {folder}/dynamic}}}}
"""  # noqa: E501
#: Sharding, and rows of the table of items. Of the 100 items, 60 fit into 62 rows of 2 buckets.
SECTIONS = {
    "dynamic": (
        "sharding: [{use: dynamic.table, tables: [t_item], options: {buckets: 2}}, "
        "{use: torchrec.column_wise, tables: [t_tags]}]",
        62,
    ),
    "replicated": ('sharding: [{use: torchrec.data_parallel, tables: ["*"]}]', 100),
    "tiers": ("sharding: [{use: flexshard.joint, tables: [t_tags]}]", 100),
    "cache": ('cache: [{use: scars.cache, tables: ["*"], options: {share: 0.1}}]', 100),
}
TODAY = SECTIONS if settings.get_current_profile_name() == "nightly" else ("dynamic", "replicated")


@pytest.mark.parametrize("name", TODAY)
def test_scores_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    sections, rows = SECTIONS[name]
    (tmp_path / "dynamic").mkdir()
    write_table(tmp_path / "train" / "a.parquet", 96)
    write_table(tmp_path / "test" / "a.parquet", 45)
    new = pq.read_table(tmp_path / "test" / "a.parquet").drop_columns(["label"])
    pq.write_table(new, tmp_path / "new.parquet")
    live: LiveModel | None = None
    left = tmp_path / "live" / "delta-00000009"
    for steps in (7, 10):
        text = REGISTRY.format(folder=tmp_path, sections=sections, rows=rows, steps=steps)
        (tmp_path / "dynamic.yaml").write_text(text)
        run_on_ranks(cases.trained, 2, tmp_path, ["dynamic"])
        run_on_ranks(cases.scored_elsewhere, 1, tmp_path, ["dynamic"])
        scores = tmp_path / "dynamic-elsewhere.parquet"
        expected = pq.read_table(scores)["score"].to_numpy()
        scores.unlink()
        current = read_note(tmp_path / "live" / "current.json")
        if live is None:
            manifests = (tmp_path / "live").glob("*/manifest.json")
            taken = {path.parent.name: json.loads(path.read_text()) for path in manifests}
            steps_of = {name: manifest["step"] for name, manifest in taken.items()}
            deltas = {f"delta-0000000{at}": step for at, step in ((2, 2), (3, 4), (4, 6), (5, 7))}
            assert steps_of == {
                **deltas,
                "base-00000001": 0,
                "base-00000003": 4,
                "base-00000005": 7,
            }
            # A server that has followed since the first base.
            digest = taken["delta-00000002"]["previous"]
            first = {"sequence": 1, "folder": "base-00000001", "sha256": digest}
            write_note(tmp_path / "live" / "current.json", {**current, "base": first, "deltas": []})
            live = LiveModel(tmp_path / "live")
            before = _scores(live, new.to_pylist())
            assert np.abs(before - expected).max() > 1e-3
            write_note(tmp_path / "live" / "current.json", current)
            assert live.update() == 4
            found = _scores(LiveModel(tmp_path / "live"), new.to_pylist())
            assert np.abs(found - expected).max() <= 1e-6
            left.mkdir()  # as by a run that was killed
        else:
            assert not left.exists()
            assert (tmp_path / "live" / "base-00000010").is_dir()
            assert live.update() >= 1  # the resumed run has programs of its own
        assert np.abs(_scores(live, new.to_pylist()) - expected).max() <= 1e-6
        with live.version() as version:
            assert version.step == steps


def _scores(live: LiveModel, rows: list[dict[str, object]]) -> np.ndarray:
    with live.version() as version:
        inputs = Encoder(version.folder).encode(rows).tensors()
        return version.programs["model.pt2"](*inputs).numpy()
