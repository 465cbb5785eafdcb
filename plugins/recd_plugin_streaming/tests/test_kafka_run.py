"""Runs on a Kafka topic that are killed at random moments train each message exactly once."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import forked
from tests.cli.programs import run_until_killed
from tests.forked import RECD

from recd_plugin_streaming.kafka import Kafka
from recd_plugin_streaming.tests.cluster import Cluster
from recd_plugin_streaming.tests.streams import COLUMNS, clicks, reader
from recd_plugins.api import table_weights

KILLS = int(os.environ.get("RECD_KILLS", "2"))
BATCH = 16
STEPS = 40 + 8 * KILLS

# Each lookup adds exactly 1 to the row of its message, on any number of ranks.
COUNTER = """
from recd_plugins.api import Model, PluginOptions, hookimpl


class Counter(Model):
    '''Counts in its table how often each id is trained.'''

    name = "test.counter"

    class Options(PluginOptions):
        rows: int
        batch: int

    def build(self, features):
        import torch
        from torch import nn
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        options = self.options

        class Count(nn.Module):
            def __init__(self):
                super().__init__()
                config = EmbeddingBagConfig(
                    name="count", feature_names=["id"], embedding_dim=4,
                    num_embeddings=options.rows, init_fn=nn.init.zeros_,
                )
                self.bags = EmbeddingBagCollection(tables=[config])
                self.bias = nn.Parameter(torch.zeros(1))

            def forward(self, batch):
                logits = self.bags(batch.sparse_features)["id"].sum(1)
                loss = -logits.sum() + 0 * self.bias.sum()
                # Later batches show in the losses which ones came before.
                return loss, (loss.detach() + batch.labels.sum(), logits.detach(), batch.labels)

        return Count()


@hookimpl
def register_plugins():
    return [Counter]
"""

REGISTRY = """version: 1
dataset:
  use: streaming.kafka
  options:
    servers: "{servers}"
    topic: clicks
    columns: {{id: id, session: key, click: label}}
    {options}
converter: {{use: recd.kjt}}
model: {{use: test.counter, options: {{rows: {rows}, batch: {batch}}}}}
training:
  batch_size: {batch}
  ranks: {ranks}
  device: cpu
  optimizer: sgd
  learning_rate: {ranks}
  steps: {steps}
  hang_timeout: 60
  progressive_validation: 2
  checkpoint: {{path: {path}, every: 3}}
"""


def registry(folder: Path, cluster: Cluster, options: str, ranks: int) -> Path:
    plugins = folder / "plugins"
    plugins.mkdir()
    (plugins / "counter.py").write_text(COUNTER)
    path = folder / "registry.yaml"
    rows = STEPS * BATCH * ranks
    text = REGISTRY.format(
        servers=cluster.servers, options=options, rows=rows, batch=BATCH, ranks=ranks, steps=STEPS,
        path=folder / "checkpoints",
    )  # fmt: skip
    path.write_text(text)
    return path


def losses(folder: Path) -> list[float]:
    newest = max((folder / "checkpoints").glob("step-*"))
    return json.loads((newest / "progress.json").read_text())["losses"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_trains_each_message_once(tmp_path: Path, ranks: int) -> None:
    """The messages arrive while the run is killed and resumed. A window has 40 messages."""
    cluster, draw = Cluster(), random.Random(time.time_ns())
    options = "group_by: session\n    window_rows: 40\n    window_seconds: 1"
    path = registry(tmp_path, cluster, options, ranks)
    messages = clicks(STEPS * BATCH * ranks)
    command = [RECD, "--plugins-dir", tmp_path / "plugins", "run", path, "--resume"]
    checkpoints = tmp_path / "checkpoints"
    program, written, kills, kill_at, before = None, 0, 0, math.inf, 0
    deadline = time.monotonic() + 20 + 10 * KILLS
    try:
        while True:
            assert program is None or time.monotonic() < deadline, program.output()[1]
            program = program or forked.Program(command)
            for message in messages[written : written + BATCH]:
                cluster.write("clicks", [message], message["id"] % 4)
            written += BATCH
            time.sleep(0.02)
            if (code := program.poll()) is not None:
                assert code == 0, program.output()[1]
                assert "lag=" in program.output()[1]
                break
            done = max((int(each.name[5:]) for each in checkpoints.glob("step-*")), default=0)
            if done > before and kills < KILLS and kill_at == math.inf:  # it makes progress
                kill_at = time.monotonic() + draw.uniform(0, 0.2)
            if time.monotonic() > kill_at:
                program.kill_all()
                program, kill_at, kills, before = None, math.inf, kills + 1, done
    finally:
        if program is not None:
            program.kill_all()
    assert kills == KILLS
    counts = table_weights(max(checkpoints.glob("step-*")), "count")
    assert counts.unique().tolist() == [1.0]
    assert len(losses(tmp_path)) == STEPS


def test_a_killed_run_has_the_losses_of_a_whole_run(tmp_path: Path) -> None:
    cluster, found = Cluster(), []
    cluster.write("clicks", [{**click, "id": click["id"] % 50} for click in clicks(600)])
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        path = registry(folder, cluster, "group_by: session\n    window_rows: 100", 1)
        text = path.read_text().replace("recd.kjt", "recd.ikjt")
        text = text.replace(f"steps: {STEPS}", "steps: 36")
        model = text[text.index("model:") : text.index("training:")]
        path.write_text(text.replace(model, "model: {embedding_dim: 8, num_embeddings: 50}\n"))
        if name == "killed":
            run_until_killed(path, folder / "checkpoints", every=9, steps=36)
        forked.run([RECD, "run", path, "--resume"], check=True)
        found.append(losses(folder))
    assert found[0] == found[1]
    assert len(set(found[0])) > 20


def test_a_signal_ends_the_wait_for_messages(tmp_path: Path) -> None:
    cluster = Cluster()
    path = registry(tmp_path, cluster, "", 2)
    for partition in (0, 1):
        cluster.write("clicks", clicks(4 * BATCH, 4 * BATCH * partition), partition)
    program = forked.Program([RECD, "--plugins-dir", tmp_path / "plugins", "run", path])
    while not (tmp_path / "checkpoints" / "step-000000003").exists():
        assert program.poll() is None, program.output()[1]
        time.sleep(0.02)
    program.send_signal(signal.SIGTERM)
    assert program.wait(30) != 0
    assert "the run was ended after step 4; its checkpoint is" in program.output()[1]
    assert len(losses(tmp_path)) == 4
    # A row of the table is 0 until its only message is trained.
    said = r"step (\d), (\d+) rows before they were trained: (.*)"
    windows = re.findall(said, program.output()[1])
    assert [(step, rows) for step, rows, _ in windows] == [("2", "64"), ("4", "64")]
    assert all("log loss 0.69315" in figures for *_, figures in windows)


OWNER = """
import sys
from recd_plugin_streaming.kafka import Kafka
from recd_plugin_streaming.tests.cluster import Cluster
from recd_plugin_streaming.tests.streams import COLUMNS, clicks, reader

cluster = Cluster()
print(cluster.servers, flush=True)
for line in sys.stdin:
    cluster.write("clicks", clicks(8, int(line)))
    print("written", flush=True)
"""


def test_servers_go_away_and_come_back(capfd: pytest.CaptureFixture[str]) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command, pipe = [sys.executable, "-c", OWNER], subprocess.PIPE
    owner = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environ)
    assert owner.stdin
    assert owner.stdout
    try:
        config = {"socket.timeout.ms": "500", "api.version.request.timeout.ms": "500"}
        options = {"topic": "clicks", "columns": COLUMNS, "config": config}
        options["servers"] = owner.stdout.readline().decode().strip()
        owner.stdin.write(b"0\n")
        owner.stdin.flush()
        owner.stdout.readline()
        stream = Kafka(Kafka.Options.model_validate(options))
        made = reader(stream)
        assert next(iter(made)).data.column("id").to_pylist() == list(range(8))
        owner.send_signal(signal.SIGSTOP)
        said = ""
        while "no server answers" not in said:
            assert made.poll(0.1) is False
            said += capfd.readouterr().err
        owner.send_signal(signal.SIGCONT)
        owner.stdin.write(b"8\n")
        owner.stdin.flush()
        assert next(iter(made)).data.column("id").to_pylist() == list(range(8, 16))
        made.close()
        assert capfd.readouterr().err.count("the servers answer again") == 1
    finally:
        owner.kill()
        owner.wait()
