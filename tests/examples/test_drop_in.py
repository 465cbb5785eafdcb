from __future__ import annotations

import json
import os
import re
import shutil
import sys
from difflib import SequenceMatcher
from pathlib import Path

import pytest
import torch
from tests import forked

from recd_plugin_recd.papercal_table import TableOptions, write_table

EXAMPLE = Path(__file__).parents[2] / "examples" / "drop_in"
COUNT_BYTES = Path(__file__).with_name("count_bytes.py")
STOCK, WITH_PLUGINS = "stock.py", "with_plugins.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    example = tmp_path / "drop_in"
    shutil.copytree(EXAMPLE, example, ignore=shutil.ignore_patterns("table", "__pycache__"))
    write_table(example / "table", TableOptions(rows=5200, row_group_rows=1024))
    return example


def lines(name: str) -> list[str]:
    return (EXAMPLE / name).read_text().splitlines()


def run(folder: Path, *script: object, ranks: int | None = None, cuda: bool = False) -> list[float]:
    environ = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    if not cuda:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, *script]
    if ranks is None:
        done = forked.run(command, cwd=folder, env=environ)
    else:
        done = forked.torchrun(command, ranks=ranks, cwd=folder, env=environ)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(len(found)))
    return [float(loss) for _, loss in found]


def test_at_most_ten_lines_differ() -> None:
    blocks = SequenceMatcher(None, lines(STOCK), lines(WITH_PLUGINS), autojunk=False).get_opcodes()
    changed = [max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in blocks if tag != "equal"]
    assert 0 < sum(changed) <= 10


def with_three_lines() -> str:
    text = (EXAMPLE / "README.md").read_text()
    changed = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)[0].splitlines()
    script = (EXAMPLE / STOCK).read_text()
    script = script.replace("import torch\n", "import recd_plugins\nimport torch\n", 1)
    for old, new in zip(changed[::2], changed[1::2], strict=True):
        assert (old[0], new[0]) == ("-", "+")
        assert script.count(old[1:] + "\n") == 1
        script = script.replace(old[1:] + "\n", new[1:] + "\n")
    return script


def test_on_two_ranks_losses_agree_and_bytes_fall(folder: Path) -> None:
    stock = run(folder, COUNT_BYTES, STOCK, "stock.json", ranks=2)
    assert len(stock) == 10
    assert stock[-1] < stock[0] - 0.1
    plugins = run(folder, COUNT_BYTES, WITH_PLUGINS, "plugins.json", ranks=2)
    assert plugins == pytest.approx(stock, abs=1e-6)
    (folder / "wrapped.py").write_text(with_three_lines())
    wrapped = run(folder, COUNT_BYTES, "wrapped.py", "wrapped.json", ranks=2)
    assert wrapped == pytest.approx(stock, abs=1e-6)
    before = json.loads((folder / "stock.json").read_text())
    for side in ("plugins", "wrapped"):
        after = json.loads((folder / f"{side}.json").read_text())
        assert after["all_to_all"] < before["all_to_all"] / 3


@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "cuda"])
def test_alone_losses_agree(folder: Path, cuda: bool) -> None:
    if cuda and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    stock = run(folder, STOCK, cuda=cuda)
    assert len(stock) == 20
    plugins = run(folder, WITH_PLUGINS, cuda=cuda)
    assert plugins == pytest.approx(stock, abs=1e-5 if cuda else 1e-6)
