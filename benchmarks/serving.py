"""Load test of examples/serving: 4 clients score requests with 38 candidates over HTTP.

Then the model is trained, and the server follows the training: 4 clients send 1,000 requests per
second with one candidate each, while a delta is published every second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from benchmarks._measure import Figure, Findings, Size, higher, lower
from recd_plugins.runtime.errors import SetupError

_EXAMPLE = Path(__file__).parents[1] / "examples" / "serving"
_RECD = ("-c", "from recd_plugins.cli import main; main()")
# Requests in the training table, training steps, requests per round, runs.
_SIZES: dict[Size, tuple[int, int, int, int]] = {
    "tiny": (20, 3, 4, 1),
    "small": (200, 50, 40, 3),
    "reference": (2000, 200, 200, 9),
}
# Seconds of following a run.
_SECONDS: dict[Size, int] = {"tiny": 0, "small": 10, "reference": 60}
# Options of measure.py.
_MODES = ("--program", "model.pt2"), (), ("--cached",)


def run(size: Size) -> Findings:
    """Train, export and serve a model, and compare the answers to ``recd predict``."""
    if find_spec("uvicorn") is None or find_spec("starlette") is None:
        raise SetupError('benchmark serving: run pip install "recd-plugins[serving]" first.')
    requests, steps, sent, runs = _SIZES[size]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:

        def call(*command: object) -> str:
            words = [sys.executable, *map(str, command)]
            done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
            if done.returncode:
                raise SetupError(f"{' '.join(words[1:])} failed:\n{done.stderr[-3000:]}")
            return done.stdout

        registry = _EXAMPLE / "registry.yaml"
        call(_EXAMPLE / "make_requests.py", "data", requests)
        call(*_RECD, "run", registry, "training.ranks=1", f"training.steps={steps}")
        call(*_RECD, "export", registry, "-o", "exported")
        call(*_RECD, "predict", registry, "data/test", "-o", "scores.jsonl")
        load = ["exported", "data/test", "--scores", "scores.jsonl", "--requests", sent]
        # Alternating: the whole program, a user program that runs for each request, and its cache.
        found = [
            [json.loads(call(_EXAMPLE / "measure.py", *load, *options)) for options in _MODES]
            for _ in range(runs)
        ]
        live = _live(call, Path(folder), env, _SECONDS[size]) if _SECONDS[size] else []
    whole, split, cached = ([each[n]["requests_per_second"] for each in found] for n in range(3))
    samples = {
        name: [max(each[name] for each in modes) for modes in found]
        for name in ("errors", "largest_difference")
    } | {name: [modes[1][name] for modes in found] for name in ("p50_ms", "p99_ms")}
    return Findings(
        f"38 candidates and a history of 100 items per request, 4 clients, {5 * sent} requests",
        [
            higher("requests_per_second", split, "1/s"),
            higher("whole_requests_per_second", whole, "1/s"),
            higher("cached_requests_per_second", cached, "1/s"),
            *(lower(name, samples[name], "ms") for name in ("p50_ms", "p99_ms")),
            lower("errors", samples["errors"], "requests", goal=0),
            lower("largest_score_difference", samples["largest_difference"], "score", goal=1e-6),
            *live,
        ],
    )


def _live(
    call: Callable[..., str], folder: Path, env: Mapping[str, str], seconds: int
) -> list[Figure]:
    """Serve a model while it is trained, then compare its scores to those of the checkpoint."""
    callbacks = "callbacks=[{use: runs.publish, options: {folder: live, seconds: 1}}]"
    endless = "training.ranks=1", "training.steps=10000000", "training.epochs=10000000"
    small = "model.embedding_dim=8", "model.top_mlp=[16]", "training.checkpoint.every=10000000"
    run = [*_RECD, "run", _EXAMPLE / "registry.yaml", *endless, *small, callbacks]
    words = [sys.executable, *map(str, run)]
    with subprocess.Popen(words, cwd=folder, env=env, stderr=subprocess.DEVNULL) as training:
        while not (folder / "live" / "current.json").exists() and training.poll() is None:
            time.sleep(0.1)
        steady = "--follow", 0.5, "--seconds", seconds, "--candidates", 1, "--cached"
        found = json.loads(call(_EXAMPLE / "measure.py", "live", "data/test", *steady))
        training.terminate()
    registry = [_EXAMPLE / "registry.yaml", "--run", 2]
    call(*_RECD, "predict", *registry, "data/test", "-o", "live.jsonl")
    last = "--scores", "live.jsonl", "--requests", 4, "--rounds", 1, "--follow", 60
    last = json.loads(call(_EXAMPLE / "measure.py", "live", "data/test", *last))
    return [
        higher("live_requests_per_second", [found["requests_per_second"]], "1/s", goal=1000),
        lower("live_errors", [found["errors"] + last["errors"]], "requests", goal=0),
        lower("live_p99_ms", [found["p99_ms"]], "ms"),
        lower("live_freshness_seconds", [found["freshness_seconds"]], "s", goal=3),
        lower("live_score_difference", [last["largest_difference"]], "score", goal=1e-6),
    ]
