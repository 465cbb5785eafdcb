"""`recd run TABLE`: the registry that is written for it, up to what a dry run shows."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests import forked
from tests.commands import invoke, recd
from tests.forked import RECD

from recd_plugin_tables.sources import _FORMATS
from recd_plugin_tables.tests.helpers import clicks
from recd_plugins.config.document import names_table


@pytest.fixture(autouse=True)
def folder(cwd: Path) -> None:
    for year in ("2024", "2025"):
        Path(year).mkdir()
        pq.write_table(clicks(), f"{year}/clicks.parquet")


run = partial(invoke, "run")


def test_a_file_that_is_there_is_kept_or_refused() -> None:
    made = Path(".recd/clicks.parquet.yaml")
    for _ in range(2):
        recd("run", "2024/clicks.parquet", "--dry-run")
    text = made.read_text()
    assert "2024/clicks.parquet" in text
    refused = run("2025/clicks.parquet", "--dry-run")
    assert refused.exit_code == 1
    assert "would be written for 2025/clicks.parquet" in refused.output.replace("\n", " ")
    made.write_text(edited := text.replace("epochs: 1", "epochs: 2"))
    assert edited != text
    used = run("2024/clicks.parquet", "--dry-run")
    assert (used.exit_code, f"using {made}" in used.output) == (0, True)
    refused = run("2024/clicks.parquet", "--label", "clicked", "--dry-run")
    assert refused.exit_code == 1
    said = refused.output.replace("\n", " ")
    assert f"Run recd run {made} to use the file, or rm {made}" in said
    assert "run recd init 2024/clicks.parquet my.yaml" in said
    assert made.read_text() == edited
    assert run(str(made), "--dry-run").exit_code == 0
    unknown = invoke("predict", "2024/clicks.parquet", "2025", "-o", "s.csv")
    assert "runs/clicks.parquet: no run in this folder has a checkpoint" in unknown.output


def test_every_format_is_told_from_a_registry() -> None:
    suffixes = [suffix for each in _FORMATS for suffix in each.suffixes]
    assert all(names_table(f"Clicks{suffix}".upper()) for suffix in suffixes)
    assert names_table("clicks.ddb")
    assert names_table("clicks.lance/")
    assert not names_table("registry.yaml")


def test_the_output_fits_one_screen_unless_verbose() -> None:
    recd("init", "2024/clicks.parquet", "a.yaml", "--validation", "0.2")
    small = ["training.batch_size=1"]
    detail = ("training.device", "auto", "sharded by", "all_reduce", "waiting for data, share")
    for options in ([], ["-v"]):
        done = forked.run([RECD, "run", "a.yaml", *small, *options], cwd=Path.cwd(), check=True)
        text = done.stderr + done.stdout
        lines = [line for line in text.splitlines() if not line.startswith("training: step=")]
        heads = r"^ +test +validation +train *$.*^ samples .*^training, "
        assert re.search(heads, text, re.M | re.S)
        assert lines[-1].startswith("saved to runs/")
        assert [word for word in detail if word in text] == ([*detail] if options else [])
        assert (len(lines) <= 30) == (not options)
        assert "for validation" in text or options
    shown = recd("runs", "a.yaml")
    assert "best normalized entropy of the validation split: runs/a/1" in shown
