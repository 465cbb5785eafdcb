"""A run that was killed, and what the next one makes of what it left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests import forked

from recd_plugin_recd.cluster import job
from recd_plugin_recd.cluster.job import ClusterOptions, cluster
from recd_plugin_recd.papercal_table import TableOptions, write_table

HIDDEN = ".dst.recd-cluster"
#: Runs the command with ranges of 1 MB, and stops itself at the n-th of some events.
SCRIPT = """
import os, signal, sys
from pathlib import Path
from recd_plugin_recd.cluster import job, sort
from recd_plugins.runtime import folders

event, count = sys.argv[1], int(sys.argv[2])
sort._plan = lambda *_: sort.Plan(1 << 20, 2)

def kill_at(owner, name):
    function = getattr(owner, name)
    def counted(*arguments, **options):
        global count
        count -= 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    setattr(owner, name, counted)

if event != "none":
    owners = {"table_writer": sort, "write_note": job.file_utils, "publish": folders.WorkFolder}
    kill_at(owners[event], event)
options = job.ClusterOptions(Path("src"), Path("dst"))
job.cluster(options, force=True, say=print)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("restart") / "src"
    for hour in range(2):
        options = TableOptions(rows=400, seed=hour, layout="interleaved", row_group_rows=100)
        write_table(folder / f"hour={hour}", options)
    return folder


def run(folder: Path, event: str = "none", count: int = 0) -> subprocess.CompletedProcess[str]:
    return forked.run([sys.executable, "-c", SCRIPT, event, str(count)], cwd=folder)


def read(folder: Path) -> list[pa.Table]:
    return [
        pa.concat_tables(pq.ParquetFile(file).read() for file in sorted(hour.iterdir()))
        for hour in sorted(folder.iterdir())
    ]


@pytest.fixture(scope="module")
def whole(source) -> list[pa.Table]:
    cluster(ClusterOptions(source, source.parent / "whole"))
    return read(source.parent / "whole")


@pytest.mark.parametrize(
    ("event", "count", "kept"), [("table_writer", 3, 0), ("write_note", 2, 1), ("publish", 1, 2)]
)
def test_a_killed_run_is_gone_on_from(tmp_path, source, whole, event, count, kept):
    (tmp_path / "src").symlink_to(source)
    killed = run(tmp_path, event, count)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "dst").exists()
    before = [file.stat().st_ino for file in (tmp_path / HIDDEN / "table").rglob("*.parquet")]
    again = run(tmp_path)
    assert again.returncode == 0, again.stderr
    assert "resuming an interrupted run" in again.stdout
    assert read(tmp_path / "dst") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "src"]
    inodes = {file.stat().st_ino for file in (tmp_path / "dst").rglob("*.parquet")}
    assert bool(before) == bool(kept)
    assert inodes >= set(before), "finished partitions are not written again"


def test_the_old_table_stays_until_the_new_one_is_whole(tmp_path, source, whole):
    (tmp_path / "src").symlink_to(source)
    (tmp_path / "dst").mkdir()
    pq.write_table(pa.table({"old": [1]}), tmp_path / "dst" / "old.parquet")
    assert run(tmp_path, "publish", 1).returncode == -signal.SIGKILL
    assert [file.name for file in (tmp_path / "dst").iterdir()] == ["old.parquet"]
    # Killed between the two renames.
    (tmp_path / "dst").rename(tmp_path / HIDDEN / "old")
    assert run(tmp_path, "publish", 1).returncode == -signal.SIGKILL
    assert [file.name for file in (tmp_path / "dst").iterdir()] == ["old.parquet"]
    assert run(tmp_path).returncode == 0
    assert read(tmp_path / "dst") == whole


def test_other_options_or_another_input_start_anew(tmp_path, source, whole, monkeypatch):
    said: list[str] = []
    target = tmp_path / "dst"

    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job, "sort_partition", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cluster(ClusterOptions(source, target))
        assert (tmp_path / HIDDEN).exists()
        with pytest.raises(KeyboardInterrupt):
            cluster(ClusterOptions(source, target, row_group_rows=50), say=said.append)
        file = next(source.rglob("*.parquet"))
        os.utime(file, ns=(0, time.time_ns()))
        with pytest.raises(KeyboardInterrupt):
            cluster(ClusterOptions(source, target, row_group_rows=50), say=said.append)
    cluster(ClusterOptions(source, target, row_group_rows=50), say=said.append)
    assert said == [
        "starting again: options changed since the interrupted run",
        "starting again: input changed since the interrupted run",
        "resuming an interrupted run",
    ]
    assert read(target) == whole
