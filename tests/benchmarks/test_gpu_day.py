"""The steps of ``benchmarks/gpu_day.sh``: what failed stays failed until it runs again."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_day.sh"


def day(folder: Path, code: int) -> tuple[int, str]:
    (step,) = re.findall(r"^step\(\) \{\n.*?^\}\n", SCRIPT.read_text(), re.M | re.S)
    work = f"echo {{}} > {folder}/a.json.part; exit {code}"
    done = subprocess.run(
        ["bash", "-uc", f'{step}step a.json 60 sh -c "{work}"; exit "$failed"'],
        env={"PATH": "/usr/bin:/bin", "folder": str(folder), "ends": "600", "failed": "0"},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_a_step_that_failed_with_a_result_is_not_done(tmp_path: Path) -> None:
    assert day(tmp_path, 1)[0] == 1
    assert (tmp_path / "a.json").exists()
    told = f"a.json: failed before; remove {tmp_path}/a.json to run it again\n"
    assert [day(tmp_path, 0) for _ in range(2)] == [(1, told)] * 2
    (tmp_path / "a.json").unlink()
    assert day(tmp_path, 0)[0] == 0
    assert day(tmp_path, 1) == (0, "a.json: done before\n")
