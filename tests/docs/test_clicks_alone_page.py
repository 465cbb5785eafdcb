"""docs/how-to/clicks_alone.md runs as it is printed, and ranks as it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tests import forked
from tests.docs.pages import blocks, page


@pytest.mark.slow
def test_the_page_ranks_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("recd_plugin_ranking")
    pytest.importorskip("recd_plugin_tables")
    monkeypatch.chdir(tmp_path)
    text = page("how-to/clicks_alone.md")
    (log,), (registry,) = blocks(text, "python"), blocks(text, "yaml")
    exec(compile(log, "clicks_alone.md", "exec"), {})
    (tmp_path / "next.yaml").write_text(registry, encoding="utf-8")
    examples = re.split(r"^\$ recd ", "".join(blocks(text, "console")), flags=re.MULTILINE)[1:]
    assert len(examples) == 5
    for example in examples:
        command, _, printed = example.partition("\n")
        done = forked.run([forked.RECD, *shlex.split(command)], check=True)
        if printed:
            assert _figures(done.stdout) == pytest.approx(_figures(printed), abs=0.03)


def _figures(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in map(str.split, text.strip().splitlines())}
