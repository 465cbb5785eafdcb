from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

import psutil
from tests import forked
from tests.examples.test_dlrm import copy


def names(process, folder):
    return any(folder in word for word in process.info["cmdline"] or ())


def test_it_is_trained_and_compared(cwd):
    changes = {
        "rows: 32768, row_group_rows: 1024": "rows: 1024, row_group_rows: 64",
        "batch_size: 256": "batch_size: 32",
        "min_readers: 1 ": "cpus: 4\n    min_readers: 1 ",
        "max_readers: 4": "max_readers: 2",
    }
    copy("ray_readers", cwd, changes)
    command = [forked.RECD, "run", "registry.yaml", "--compare", "--json", "out.json"]
    with tempfile.TemporaryDirectory() as folder:  # a short path, as sockets stand in it
        done = forked.run(command, env={**os.environ, "TMPDIR": folder}, timeout=280)
        assert list(Path(folder).glob("recd-ray-*")) == []
        assert [each for each in psutil.process_iter(["cmdline"]) if names(each, folder)] == []
    assert done.returncode == 0, done.stderr
    assert re.search(r"losses\s+of\s+(all\s+)?16\s+steps", done.stdout), done.stdout
    json.loads(Path("out.json").read_text())
    assert "Traceback" not in done.stderr
    assert "ray.io" not in done.stderr, "what Ray writes does not reach the user"
