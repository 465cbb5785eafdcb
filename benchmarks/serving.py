"""Load test of examples/serving: 4 clients score requests with 38 candidates over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from benchmarks._measure import Findings, Size, higher, lower
from recd_plugins.runtime.errors import SetupError

_EXAMPLE = Path(__file__).parents[1] / "examples" / "serving"
_RECD = ("-c", "from recd_plugins.cli import main; main()")
# Requests in the training table, training steps, requests per round, runs.
_SIZES: dict[Size, tuple[int, int, int, int]] = {
    "tiny": (20, 3, 4, 1),
    "small": (200, 50, 40, 3),
    "reference": (2000, 200, 200, 9),
}
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
        ],
    )
