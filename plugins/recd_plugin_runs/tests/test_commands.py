"""What `recd evaluate`, `predict`, `export` and `embeddings` refuse before anything is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click import Context
from tests import commands, forked

from recd_plugins.cli import main

REGISTRY = """
version: 1
dataset: {dataset}
converter: {{use: recd.kjt}}
training: {{device: cpu{checkpoint}}}
"""
SESSIONS = "{{use: recd.session_parquet, options: {{path: train{test}}}}}"
TEST, KEPT = ", test_path: test", ", checkpoint: {path: kept}"
EVALUATE = ["evaluate", "r.yaml"]
PREDICT = ["predict", "r.yaml", "new.parquet", "-o", "scores.parquet"]
EXPORT = ["export", "r.yaml", "-o", "exported"]
ROWS = ["embeddings", "r.yaml", "t_item", "-o", "rows.parquet"]


pytestmark = pytest.mark.usefixtures("cwd")


def registry(test: str = TEST, checkpoint: str = KEPT, dataset: str = "") -> str:
    return REGISTRY.format(dataset=dataset or SESSIONS.format(test=test), checkpoint=checkpoint)


def refusal(words: list[str], **parts: str) -> str:
    Path("r.yaml").write_text(registry(**parts), encoding="utf-8")
    return commands.refusal(*words)


def make_checkpoint(folder: Path) -> None:
    checkpoint = folder / "kept" / "step-000000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "progress.json").write_text('{"step": 1}')


@pytest.mark.parametrize("words", [EVALUATE, PREDICT, EXPORT, ROWS])
def test_without_a_checkpoint_they_say_how_to_make_one(words: list[str]) -> None:
    said = refusal(words)
    assert "kept: there is no checkpoint in this folder. Train first: recd run r.yaml" in said
    assert "training.checkpoint.path is not set" in refusal(words, checkpoint="")
    said = refusal([*words, "--checkpoint", "nothing"])
    assert "nothing: there is no checkpoint in this folder" in said


RANK = ["rank", "r.yaml"]


@pytest.mark.parametrize("words", [EVALUATE, PREDICT, EXPORT, ROWS, RANK])
def test_values_of_the_file_are_set_in_one_way(words: list[str]) -> None:
    if words[0] not in main.list_commands(Context(main)):
        pytest.skip(f"no plugin has {words[0]}")
    said = refusal([*words, "training.checkpoint.path=elsewhere"])
    assert "elsewhere: there is no checkpoint in this folder" in said
    assert "Did you mean 'batch_size" in refusal([*words, "training.batch_siz=3"])


def test_what_cannot_be_written_or_read_is_told_first(tmp_path: Path) -> None:
    assert "the suffix is not one of '.parquet', '.csv'" in refusal([*PREDICT[:-1], "scores.txt"])
    assert "rows.csv: the output is Parquet" in refusal([*ROWS[:-1], "rows.csv"])
    make_checkpoint(tmp_path)
    assert "--keep score" in refusal([*PREDICT, "--keep", "score"])
    assert "no test split" in refusal(EVALUATE, test="")
    assert "new.parquet: this file or folder does not exist" in refusal(PREDICT)
    keep = ["--keep", "b", "--keep", "user.c"]
    (tmp_path / "new.csv").write_text("a,b\n")
    said = refusal([*PREDICT[:2], "new.csv", *PREDICT[3:], *keep])
    assert "new.csv: --keep copies columns of Parquet tables only" in said
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "new.parquet")
    assert "the table has no column 'user.c' for --keep. Its columns" in refusal([*PREDICT, *keep])
    explode = "{path: train, columns: {a: ids, b: label}, explode: [a]}"
    said = refusal([*PREDICT, *keep], dataset=f"{{use: tables.table, options: {explode}}}")
    assert "--keep cannot be used with dataset option 'explode'" in said
    assert "join the score file on 'row', the row of the table, and 'candidate'" in said
    (tmp_path / "new.parquet").write_bytes(b"a table")
    for table, output in (("new.parquet", "new.parquet"), (".", "scores.parquet")):
        said = refusal(["predict", "r.yaml", table, "-o", output, "--force"])
        assert f"{output}: the output would replace or be inside the input '{table}'" in said
    (tmp_path / "train").mkdir()
    for place in ("kept/step-000000001", "train", "test"):
        for words in (PREDICT[:-1], ROWS[:-1]):
            said = refusal([*words, f"{place}/a.parquet", "--force"])
            assert f"a.parquet: the output would replace or be inside the input '{place}'" in said
        said = refusal([*EXPORT[:-1], place, "--force"])
        assert f"the output would replace or be inside the input '{place}'" in said


def test_data_that_rank_0_cannot_prepare_is_told_by_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(registry(), encoding="utf-8")
    make_checkpoint(tmp_path)
    command = [sys.executable, "-c", "from recd_plugins.cli import main; main()", *EVALUATE]
    done = forked.torchrun(command, ranks=2, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("train: no such file or folder") == 2, done.stderr
    assert "fault" not in done.stderr
