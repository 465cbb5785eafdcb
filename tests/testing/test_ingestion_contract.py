"""The contract of ingestions notices readers that outlive a trainer which is killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests import forked

SOURCE = '''
from concurrent.futures import ProcessPoolExecutor
from itertools import count
import pytest
from recd_plugins.api import Feed, Ingestion
from recd_plugins.api import WorkerContext, hand_out, processes
from recd_plugins.testing.contracts import IngestionContract

READER = []

def start(task):
    ENDS
    READER.append(task.open())

def make(position, number):
    return READER[0].block(position, number)

class Pool(Ingestion):
    """A pool of processes."""
    name = "test.pool"
    def open(self, task): return PoolFeed(task)

class PoolFeed(Feed):
    def __init__(self, task):
        self._pool = ProcessPoolExecutor(
            2, mp_context=CONTEXT, initializer=start, initargs=(task,)
        )
    def read(self, reader):
        position = reader.state_dict()
        return hand_out((self._pool.submit(make, position, n).result() for n in count()), reader)
    def close(self): self._pool.shutdown(cancel_futures=True)

class TestPool(IngestionContract):
    @pytest.fixture
    def plugin(self): return Pool(Pool.Options())
'''


@pytest.mark.parametrize(
    ("ends", "passes"),
    [("processes.end_with_parent()", True), ("pass", False)],
    ids=["ends", "stays"],
)
def test_readers_that_outlive_a_killed_trainer(tmp_path: Path, ends: str, passes: bool) -> None:
    context = "__import__('multiprocessing').get_context('forkserver')"
    source = SOURCE.replace("ENDS", ends).replace("CONTEXT", context)
    (tmp_path / "test_pool.py").write_text(source)
    done = forked.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "killed", "."],
        cwd=tmp_path,
        env=dict(os.environ),
    )
    assert ("1 passed" in done.stdout) == passes, done.stdout
    if not passes:
        assert "end_with_parent in each process" in done.stdout, done.stdout
