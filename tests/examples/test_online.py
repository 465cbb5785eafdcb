"""The example of online training: messages that arrive change the served model."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.forked import RECD

from recd_plugin_runs.encode import Encoder
from recd_plugins.serving import LiveModel

pytest.importorskip("confluent_kafka", reason="needs the extra kafka")

EXAMPLE = Path(__file__).parents[2] / "examples" / "online"
#: An item that is often shown from request 500 on, and one that does not exist.
NEW, UNKNOWN = 104_729_000_021 * (500 + 500 // 20 - 1), 5


def scores(live: LiveModel) -> list[float]:
    rows = [{"user": 1, "item": item, "history": [2]} for item in (NEW, UNKNOWN)]
    with live.version() as version:
        inputs = Encoder(version.folder).encode(rows).tensors()
        return version.programs["model.pt2"](*inputs).tolist()


def wait_until(is_done: Callable[[], bool], run: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 90
    while not is_done():
        assert run.poll() is None, "the run ended"
        assert time.monotonic() < end
        time.sleep(0.2)


def test_messages_change_the_served_model(cwd: Path) -> None:
    from recd_plugin_streaming.tests.cluster import Cluster

    cluster = Cluster()
    shutil.copy(EXAMPLE / "registry.yaml", cwd)

    send = [sys.executable, str(EXAMPLE / "send.py"), cluster.servers]
    subprocess.run([*send, "--requests=400"], check=True)
    servers = f"dataset.options.servers={cluster.servers}"
    with subprocess.Popen([RECD, "run", "registry.yaml", servers]) as run:
        try:
            wait_until(Path("live/current.json").exists, run)
            live = LiveModel("live")
            new, unknown = scores(live)
            assert new == unknown
            # A version is published at a step, so messages have to go on.
            with subprocess.Popen([*send, "--first=400", "--rate=150"]) as sending:
                try:
                    wait_until(lambda: live.update() > 0 and len({*scores(live)}) == 2, run)
                finally:
                    sending.terminate()
            assert 0 <= live.freshness < 90
            body = json.loads(re.findall(r"-d '(.*?)'", (EXAMPLE / "README.md").read_text())[0])
            with live.version() as version:
                features = json.loads((version.folder / "signature.json").read_text())["features"]
            assert {each["feature"] for each in features if each["user"]} == set(body["request"])
        finally:
            run.send_signal(signal.SIGTERM)
            run.wait(60)
    assert list(Path("checkpoints").glob("step-*"))
