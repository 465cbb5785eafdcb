"""Scores by a checkpoint: of every row, the same whatever placed the tables on how many ranks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import settings
from tests.training.test_evaluation import write_table

from recd_plugin_runs.evaluate import write_embeddings
from recd_plugin_runs.export import ENCODE, INT8_PROGRAM, PROGRAM, Int8Rows, export_to, inputs_of
from recd_plugin_runs.notes import say_absent
from recd_plugin_runs.tests import predict_cases as cases
from recd_plugins import load_registry
from recd_plugins.interfaces import Origin, Rows
from recd_plugins.runtime.errors import DataError, RecdError
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint_dcp import table_weights
from recd_plugins.training.checkpoint_files import IDENTITY, MANIFEST, manifest_text, read_manifest
from recd_plugins.training.quality import measure
from recd_plugins.training.trained import with_trained_columns

REGISTRY = """
version: 1
dataset: {{use: recd.session_parquet, options: {{path: {folder}/train, test_path: {folder}/test}}}}
converter: {{use: {converter}}}
pooling: [{{use: recd.mean, features: [tags]}}]
preprocessing: [{{use: recd.sigrid_hash, features: [item], options: {{buckets: 50}}}}]
model: {{embedding_dim: 8, num_embeddings: 100, bottom_mlp: [16], top_mlp: [32]}}
{sections}
training:
  {{batch_size: 8, device: cpu, learning_rate: 0.05, evaluate: false, checkpoint: {{path: {own}}}}}
"""
SECTIONS = {
    "nothing": "",
    "table_wise": 'sharding: [{use: torchrec.table_wise, tables: ["*"]}]',
    "row_wise": 'sharding: [{use: torchrec.row_wise, tables: ["*"]}]',
    "tiers": "sharding: [{use: flexshard.joint, tables: [t_tags]}]",
    "cache": 'cache: [{use: scars.cache, tables: ["*"], options: {share: 0.1}}]',
}
#: By day one of the placements that keep rows of their own.
TODAY = SECTIONS if settings.get_current_profile_name() == "nightly" else ("nothing", "cache")
CASES = {"plain": ("recd.kjt", ""), **{name: ("recd.ikjt", SECTIONS[name]) for name in TODAY}}
ROWS = 45


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    write_table(folder / "train" / "a.parquet", 64)
    write_table(folder / "test" / "a.parquet", ROWS)
    new = pq.read_table(folder / "test" / "a.parquet").drop_columns(["label"])
    pq.write_table(new, folder / "new.parquet", row_group_size=7)
    for name, (converter, sections) in CASES.items():
        given = {"folder": folder, "own": folder / name, "converter": converter}
        text = REGISTRY.format(sections=sections, **given)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    run_on_ranks(cases.trained, 2, folder, list(CASES))
    return folder


def test_scores_are_those_that_evaluation_sees(folder: Path) -> None:
    labels = pq.read_table(folder / "test" / "a.parquet")["label"].to_numpy()
    names = list(CASES)
    by_ranks = {size: run_on_ranks(cases.scored, size, folder, names)[0] for size in (1, 2)}
    for number, name in enumerate(CASES):
        tables = [pq.read_table(folder / f"{name}-{ranks}.parquet") for ranks in by_ranks]
        for table in tables:
            assert table.column_names == ["session_id", "ts", "row", "score"]
            assert table["ts"].to_pylist() == table["row"].to_pylist() == list(range(ROWS))
        one, two = (table["score"].to_numpy() for table in tables)
        assert np.abs(one - two).max() <= 1e-6, name
        assert len(set(one)) == ROWS  # of ties an order decides what AUC is
        quality = measure(torch.tensor(one).logit(), torch.tensor(labels, dtype=torch.float64))
        if name == "nothing":  # deduplicated
            plain = pq.read_table(folder / "plain-1.parquet")["score"].to_numpy()
            assert np.abs(one - plain).max() <= 1e-6
        for found in by_ranks.values():
            test = found[number].test
            assert test.num_samples == ROWS
            assert test.auc == pytest.approx(quality.auc, abs=1e-5), name
            assert test.normalized_entropy == pytest.approx(quality.normalized_entropy, abs=1e-5)


def test_the_data_of_the_training_need_not_be_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = cases.newest(folder / "nothing")
    trained = load_registry(folder / "nothing.yaml")
    (folder / "train").rename(folder / "train elsewhere")
    try:
        run_on_ranks(cases.scored_elsewhere, 2, folder, list(CASES))
        absent = with_trained_columns(load_registry(folder / "nothing.yaml"), checkpoint)
        say_absent(absent, checkpoint)
        assert export_to(absent, checkpoint, folder / "exported elsewhere", int8=True) is None
        assert write_embeddings(absent, checkpoint, "t_item", folder / "rows.parquet") == 100
        int8 = folder / "exported elsewhere" / INT8_PROGRAM
        assert int8.exists()
        export_to(absent, checkpoint, int8.parent, int8=False)
        assert not int8.exists(), "it may be of another checkpoint"
        with pytest.raises(DataError, match=r"train: no such file or folder"):
            absent.dataset.reader(rank=0, world_size=1, batch_size=8, split="train")
    finally:
        (folder / "train elsewhere").rename(folder / "train")
    said = capsys.readouterr().err
    assert "The training data cannot be read (" in said
    assert f"columns stored in {checkpoint}" in said
    assert absent.dataset.schema() == trained.dataset.schema()
    for name in CASES:
        expected = pq.read_table(folder / f"{name}-2.parquet")["score"].to_numpy()
        found = pq.read_table(folder / f"{name}-elsewhere.parquet")["score"].to_numpy()
        assert np.abs(found - expected).max() <= 1e-6, name
    names = [ENCODE, PROGRAM, "sample_request.json", "signature.json"]
    assert sorted(p.name for p in (folder / "exported elsewhere").iterdir()) == sorted(names)


def test_an_export_gives_the_same_scores(folder: Path) -> None:
    registry = load_registry(folder / "nothing.yaml")
    error = export_to(registry, cases.newest(folder / "nothing"), folder / "exported", int8=True)
    assert error.rows == 64
    assert 0 < error.mean <= error.largest < 1e-3
    expected = pq.read_table(folder / "nothing-1.parquet")["score"].to_numpy()
    rows = pq.read_table(folder / "test" / "a.parquet")
    (batch,) = rows.combine_chunks().to_batches()
    schema = registry.dataset.schema()
    dense, values, lengths, places = inputs_of(schema, Rows(batch, (Origin("a", 0, len(batch)),)))
    program = torch.export.load(folder / "exported" / PROGRAM)
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert {str(each).split(".")[0] for each in called if "." in str(each)} <= {"aten"}
    model = program.module()
    assert np.abs(model(dense, values, lengths, places).numpy() - expected).max() <= 1e-6
    # Rows of a session share their tags, which are stored once: every third.
    lists = rows["tags"].to_pylist()[::3]
    values["tags"] = torch.tensor([id for ids in lists for id in ids])
    lengths["tags"], places["tags"] = torch.full((len(lists),), 2), torch.arange(ROWS) // 3
    assert np.abs(model(dense, values, lengths, places).numpy() - expected).max() <= 1e-6
    quantized = torch.export.load(folder / "exported" / INT8_PROGRAM).module()
    scores = quantized(dense, values, lengths, places).numpy()
    assert np.abs(scores - expected).max() <= 2 * error.largest


@pytest.mark.parametrize("wrong", [-1, 30])
def test_ids_that_a_quantized_table_has_no_row_of_are_refused(wrong: int) -> None:
    with pytest.raises(IndexError, match="out of range"):
        Int8Rows(torch.randn(30, 8))(torch.tensor([0, wrong]))


@pytest.mark.parametrize("name", ["nothing", "cache"])
def test_rows_of_a_table_are_written(folder: Path, name: str) -> None:
    checkpoint = cases.newest(folder / name)
    output = folder / f"{name}-rows.parquet"
    registry = load_registry(folder / f"{name}.yaml")
    assert write_embeddings(registry, checkpoint, "t_item", output) == 100
    rows = pq.read_table(output)
    assert rows["id"].to_pylist() == list(range(100))
    expected = table_weights(checkpoint, "t_item")
    assert np.array_equal(np.array(rows["vector"].to_pylist(), np.float32), expected.numpy())
    with pytest.raises(RecdError, match=r"no table 't_itm'\. Did you mean 't_item"):
        write_embeddings(registry, checkpoint, "t_itm", output)


def test_another_model_is_refused(folder: Path) -> None:
    text = (folder / "plain.yaml").read_text(encoding="utf-8")
    other = folder / "other.yaml"
    other.write_text(text.replace("buckets: 50", "buckets: 49"), encoding="utf-8")
    checkpoint = cases.newest(folder / "plain")
    table = str(folder / "new.parquet")
    (said,) = run_on_ranks(cases.refused, 1, other, checkpoint, table)
    other_model = "belongs to another model: preprocessing[0].options.buckets was 50"
    assert f"{checkpoint}: the checkpoint {other_model}" in said
    with pytest.raises(RecdError, match=re.escape(other_model)):
        write_embeddings(load_registry(other), checkpoint, "t_item", folder / "other.parquet")
    assert not (folder / "other.parquet").exists()
    (said,) = run_on_ranks(cases.refused, 1, folder / "plain.yaml", checkpoint, str(checkpoint))
    assert "step-" in said


def test_rows_of_a_checkpoint_that_says_nothing_of_its_run(folder: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(cases.newest(folder / "plain"), tmp_path / "own")
    files = read_manifest(checkpoint)
    del files[IDENTITY]
    (checkpoint / IDENTITY).unlink()
    (checkpoint / MANIFEST).write_text(manifest_text(files), encoding="utf-8")
    lines = (folder / "plain.yaml").read_text(encoding="utf-8").splitlines(keepends=True)
    plain = tmp_path / "plain.yaml"
    plain.write_text("".join(line for line in lines if not line.startswith("preprocessing")))
    output = tmp_path / "rows.parquet"
    assert write_embeddings(load_registry(plain), checkpoint, "t_item", output) == 100
    with pytest.raises(RecdError, match="recd run did not write this checkpoint"):
        write_embeddings(load_registry(folder / "plain.yaml"), checkpoint, "t_item", output)


def test_each_turn_is_a_sign_that_ranks_get_on(folder: Path) -> None:
    ((by_turns, at_once),) = run_on_ranks(cases.noted, 1, folder)
    assert by_turns - at_once >= (ROWS - 1) // 8
