"""The serving example: trained, exported and asked over HTTP, small."""

from __future__ import annotations

import http.client
import importlib
import json
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests import forked

from recd_plugin_runs.export import export_to
from recd_plugins import load_registry
from recd_plugins.training.run_folders import chosen_checkpoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "serving"
TRAINING = ["training.ranks=1", "training.batch_size=64", "training.steps=3"]


def test_a_request_is_scored_as_its_rows_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in ("serve", "measure", "make_requests"):
        sys.modules.pop(name, None)
    made, measure, serve = map(importlib.import_module, ("make_requests", "measure", "serve"))
    made.main(Path("data"), 20)
    registry = str(EXAMPLE / "registry.yaml")
    done = forked.run([forked.RECD, "run", registry, *TRAINING, "training.evaluate=false"])
    assert done.returncode == 0, done.stderr
    table = "data/test/requests.parquet"
    done = forked.run([forked.RECD, "predict", registry, table, "-o", "s.jsonl", "--ranks", "1"])
    assert done.returncode == 0, done.stderr
    read = load_registry(registry)
    export_to(read, chosen_checkpoint(read, "newest"), Path("exported"), int8=False)
    scorer = serve.Scorer(Path("exported"))
    sent = measure.bodies(Path("data/test"), 4)
    found = measure.measured(scorer, sent, rounds=1)
    assert found["largest_difference"] <= 1e-6
    assert found["bytes"]["once"] < found["bytes"]["plain"] / 5
    predicted = [json.loads(line) for line in Path("s.jsonl").read_text().splitlines()]
    assert len(predicted) == pq.read_metadata(table).num_rows == 4 * made.CANDIDATES
    body = json.loads(sent[0]["once"])
    scores = scorer.score(body["request"], body["candidates"])
    expected = [row["score"] for row in predicted[: made.CANDIDATES]]
    assert scores == pytest.approx(expected, abs=1e-6)
    with pytest.raises(KeyError, match="item"):
        scorer.score(body["request"], [{"category": [1], "price": 0.5}])
    one = body["candidates"][:1]
    for more, told in (
        ({"price": 0.5}, "price: sent in both request and candidates"),
        ({"item": [1]}, "item: sent in both request and candidates"),
        ({"history": [3.5]}, "history: ids must be integers"),
    ):
        with pytest.raises(ValueError, match=told):
            scorer.score({**body["request"], **more}, one)
    with serve.server(scorer) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        connection = http.client.HTTPConnection("127.0.0.1", running.server_port)
        request = {**body["request"], "history": [10**9]}  # an id that no row of a table has
        sent_again = json.dumps({"request": request, "candidates": one}).encode()
        assert "error" in measure.post(connection, sent_again)
        connection.close()
        running.shutdown()
