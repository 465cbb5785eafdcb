from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
from tests.commands import recd

EXAMPLE = Path(__file__).parents[2] / "examples" / "mind"


def behaviors(num: int) -> str:
    lines = []
    for i in range(num):
        history = " ".join(f"N{(i * 7 + j) % 50}" for j in range(i % 9))
        shown = " ".join(f"N{(i + j * 3) % 50}-{int(j == i % 4)}" for j in range(4 + i % 5))
        lines.append(
            f"{i + 1}\tU{i % 12}\t11/{11 + i % 9}/2019 {i % 12 + 1}:05:58 AM\t{history}\t{shown}\n"
        )
    return "".join(lines)


def prepare(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / "prepare.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_requests_become_a_registry_with_a_row_for_each_news(cwd: Path) -> None:
    Path("behaviors.tsv").write_text(behaviors(60))
    assert prepare("behaviors.tsv", "train.parquet").returncode == 0
    table = pq.read_table("train.parquet").to_pylist()
    assert len(table) == 60
    assert [each["click"] for each in table[5]["shown"]] == [0, 1, 0, 0]
    assert table[8]["history"] == [f"N{(56 + j) % 50}" for j in range(8)]

    shown = recd("init", "train.parquet", "mind.yaml")
    assert "Each list element of 'shown' becomes a row" in shown
    text = Path("mind.yaml").read_text()
    assert "explode: [shown]" in text
    assert '"shown.click": label' in text or "shown.click: label" in text
    recd("validate", "mind.yaml")


def test_a_line_of_another_form_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "behaviors.tsv"
    bad.write_text(behaviors(2) + "3\tU1\tyesterday\tN1\tN2-0\n")
    done = prepare(bad, tmp_path / "out.parquet")
    assert done.returncode == 1
    assert f"{bad}, line 3: not in the format of MIND's behaviors.tsv" in done.stderr
