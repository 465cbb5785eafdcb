"""`recd profile` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from recd_plugins.cli import main
from recd_plugins.interfaces.access import AccessProfile

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: table
    sparse: [item_0, usr_0, "seq_0_*"]
    generate: {rows: 512, row_group_rows: 256}
converter: {use: recd.kjt}
preprocessing:
  - {use: recd.sigrid_hash, features: ["*"], options: {buckets: 500}}
model: {embedding_dim: 8, num_embeddings: 500, bottom_mlp: [16], top_mlp: [16]}
training: {batch_size: 64}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "registry.yaml").write_text(REGISTRY, encoding="utf-8")
    return tmp_path


def profile(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["profile", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_the_tables_of_the_model(folder: Path) -> None:
    result = profile("registry", "registry.yaml", "-o", "p.parquet", "--json", "p.json")
    assert result.exit_code == 0, result.output
    assert "512 rows of registry.yaml" in result.stdout
    loaded = AccessProfile.load(folder / "p.parquet")
    assert {name for name in loaded.tables if "seq" not in name} == {"t_item_0", "t_usr_0"}
    report = json.loads((folder / "p.json").read_text())
    for name, table in loaded.tables.items():
        figures = report["tables"][name]
        assert figures["samples"] == 512
        assert figures["length"] == table.length
        assert figures["unread_rows"] == 500 - len(table.rows)
        assert figures["share_of_accesses"]["1 %"] == table.covered(5)
    shown = profile("show", "p.parquet", "--plot", "plots/p.svg")
    assert shown.stdout == result.stdout
    assert "t_usr_0" in shown.stdout
    assert (folder / "plots" / "p.svg").read_text().count("<svg")


def test_some_tables_and_rows_and_a_bound(folder: Path) -> None:
    options = ["--tables", "*_0_0", "--tables", "t_usr_0", "--rows", "100", "--bound", "5"]
    result = profile("registry", "registry.yaml", "-o", "p.parquet", *options)
    assert result.exit_code == 0, result.output
    tables = AccessProfile.load(folder / "p.parquet").tables
    assert tables.keys() == {"t_usr_0", "t_seq_0_0"}
    assert all(table.samples == 100 and len(table.rows) <= 5 for table in tables.values())
    assert "increase --bound" in result.stdout


def test_tables_of_a_model_of_one_s_own(folder: Path) -> None:
    lines = [line for line in REGISTRY.splitlines() if not line.startswith("model:")]
    (folder / "registry.yaml").write_text("\n".join(lines))
    assert "no model: section" in profile("registry", "registry.yaml", "-o", "p").output
    own = ["--table", "mine", "700", "item_0,usr_0"]
    assert profile("registry", "registry.yaml", "-o", "p", *own).exit_code == 0
    table = AccessProfile.load(folder / "p").covering("mine", 700)
    assert table.features == ("item_0", "usr_0")
    assert table.total >= 1024


def test_what_is_sent_or_all_rows(folder: Path) -> None:
    (folder / "registry.yaml").write_text(REGISTRY.replace("recd.kjt", "recd.ikjt"))
    result = profile("registry", "registry.yaml", "-o", "sent", "--json", "sent.json")
    assert result.exit_code == 0, result.output
    assert "the unique rows of batches of 64 are counted" in " ".join(result.stdout.split())
    all_rows = profile("registry", "registry.yaml", "-o", "all", "--all-rows")
    assert all_rows.exit_code == 0, all_rows.output
    assert "unique" not in all_rows.stdout
    sent, every = (
        AccessProfile.load(folder / name).tables["t_seq_0_0"] for name in ("sent", "all")
    )
    assert (sent.batch_size, every.batch_size) == (64, None)
    assert sent.dedupe_factor == every.total / sent.total > 1
    figures = json.loads((folder / "sent.json").read_text())["tables"]["t_seq_0_0"]
    assert (figures["dedupe_factor"], figures["batch_size"]) == (sent.dedupe_factor, 64)
    assert profile("merge", "sent", "sent", "-o", "both").exit_code == 0
    refused = profile("merge", "sent", "all", "-o", "neither")
    assert "Create both with recd profile" in " ".join(refused.output.split())
    assert not (folder / "neither").exists()


def test_merged(folder: Path) -> None:
    assert profile(*ZIPF, "-o", "a").exit_code == 0
    assert profile("merge", "a", "a", "a", "-o", "b").exit_code == 0
    table = AccessProfile.load(folder / "b").tables["t"]
    assert (table.samples, table.length) == (3, pytest.approx(5))
    refused = profile("merge", "b", "a", "-o", "a", "--force")
    assert "a: this file is also an input (profiles)" in refused.output
    assert profile(*ZIPF, "--rows", "51", "-o", "d").exit_code == 0
    assert "table 't': num_embeddings is 50" in profile("merge", "a", "d", "-o", "e").output
    assert not (folder / "e").exists()


ZIPF = ["zipf", "--table", "t", "--rows", "50", "--length", "5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["registry", "registry.yaml", "-o", "p", "--tables", "t_use_0"], "Did you mean 't_usr_0"),
        (["registry", "registry.yaml", "-o", "registry.yaml"], "registry.yaml already exists"),
        (
            ["registry", "registry.yaml", "-o", "p", "--table", "t", "9", "usr"],
            "mean 'usr_0'?",
        ),
        (["show", "missing"], "missing: no such file"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, arguments: list[str], message: str) -> None:
    result = profile(*arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
    assert not (folder / "p").exists()
