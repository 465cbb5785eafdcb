from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from tests.commands import invoke, recd
from tests.small_registry import hashed, papercal, write_registry

from recd_plugins.interfaces.access import AccessProfile


@pytest.fixture
def folder(cwd: Path) -> Path:
    write_registry(
        cwd,
        dataset=papercal(cwd, 512, 256, sparse=["item_0", "usr_0", "seq_0_*"]),
        preprocessing=hashed(500),
        model={"embedding_dim": 8, "num_embeddings": 500},
        training={"batch_size": 64},
    )
    return cwd


profile = partial(invoke, "profile")


def test_the_tables_of_the_model(folder: Path) -> None:
    said = recd("profile", "registry", "registry.yaml", "-o", "p.parquet", "--json", "p.json")
    assert "512 rows of registry.yaml" in said
    loaded = AccessProfile.load(folder / "p.parquet")
    assert {name for name in loaded.tables if "seq" not in name} == {"t_item_0", "t_usr_0"}
    report = json.loads((folder / "p.json").read_text())
    for name, table in loaded.tables.items():
        figures = report["tables"][name]
        assert figures["samples"] == 512
        assert figures["length"] == table.length
        assert figures["unread_rows"] == 500 - len(table.rows)
        assert figures["share_of_accesses"]["1 %"] == table.covered(5)
    assert profile("show", "p.parquet", "--plot", "plots/p.svg").stdout == said
    assert "t_usr_0" in said
    assert (folder / "plots" / "p.svg").read_text().count("<svg")


def test_some_tables_and_rows_and_a_bound(folder: Path) -> None:
    options = ["--tables", "*_0_0", "--tables", "t_usr_0", "--rows", "100", "--bound", "5"]
    said = recd("profile", "registry", "registry.yaml", "-o", "p.parquet", *options)
    tables = AccessProfile.load(folder / "p.parquet").tables
    assert tables.keys() == {"t_usr_0", "t_seq_0_0"}
    assert all(table.samples == 100 and len(table.rows) <= 5 for table in tables.values())
    assert "increase --bound" in said


def test_tables_of_a_model_of_one_s_own(folder: Path) -> None:
    path = folder / "registry.yaml"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("model:")))
    assert "no model: section" in profile("registry", "registry.yaml", "-o", "p").output
    own = ["--table", "mine", "700", "item_0,usr_0"]
    recd("profile", "registry", "registry.yaml", "-o", "p", *own)
    table = AccessProfile.load(folder / "p").covering("mine", 700)
    assert table.features == ("item_0", "usr_0")
    assert table.total >= 1024


def test_what_is_sent_or_all_rows(folder: Path) -> None:
    path = folder / "registry.yaml"
    path.write_text(path.read_text().replace("recd.kjt", "recd.ikjt"))
    said = recd("profile", "registry", "registry.yaml", "-o", "sent", "--json", "sent.json")
    assert "the unique rows of batches of 64 are counted" in " ".join(said.split())
    said = recd("profile", "registry", "registry.yaml", "-o", "all", "--all-rows")
    assert "unique" not in said
    loaded = (AccessProfile.load(folder / name) for name in ("sent", "all"))
    sent, every = (each.tables["t_seq_0_0"] for each in loaded)
    assert (sent.batch_size, every.batch_size) == (64, None)
    assert sent.dedupe_factor == every.total / sent.total > 1
    figures = json.loads((folder / "sent.json").read_text())["tables"]["t_seq_0_0"]
    assert (figures["dedupe_factor"], figures["batch_size"]) == (sent.dedupe_factor, 64)
    recd("profile", "merge", "sent", "sent", "-o", "both")
    refused = profile("merge", "sent", "all", "-o", "neither")
    assert "Create both with recd profile" in " ".join(refused.output.split())
    assert not (folder / "neither").exists()


def test_merged(folder: Path) -> None:
    recd("profile", *ZIPF, "-o", "a")
    recd("profile", "merge", "a", "a", "a", "-o", "b")
    table = AccessProfile.load(folder / "b").tables["t"]
    assert (table.samples, table.length) == (3, pytest.approx(5))
    refused = profile("merge", "b", "a", "-o", "a", "--force")
    assert "a: this file is also an input (profiles)" in refused.output
    recd("profile", *ZIPF, "--rows", "51", "-o", "d")
    assert "table 't': num_embeddings is 50" in profile("merge", "a", "d", "-o", "e").output
    assert not (folder / "e").exists()


ZIPF = ["zipf", "--table", "t", "--rows", "50", "--length", "5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["registry", "registry.yaml", "-o", "p", "--tables", "t_use_0"], "Did you mean 't_usr_0"),
        (["registry", "registry.yaml", "-o", "registry.yaml"], "registry.yaml already exists"),
        (["registry", "registry.yaml", "-o", "p", "--table", "t", "9", "usr"], "mean 'usr_0'?"),
        (["show", "missing"], "missing: no such file"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, arguments: list[str], message: str) -> None:
    result = profile(*arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
    assert not (folder / "p").exists()
