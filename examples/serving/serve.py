"""An HTTP server that scores candidates with an exported model. Needs only torch.

python serve.py exported --port 8000

POST /score accepts {"request": {...}, "candidates": [{...}, ...]} and returns {"scores": [...]}.
Put a feature into "request" if all candidates share its value, otherwise into every candidate.
"""

from __future__ import annotations

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Scorer:
    """Scores candidates with an exported model.

    Args:
        folder: output folder of ``recd export``.
        program: file name of the exported program in ``folder``.
    """

    def __init__(self, folder: Path, program: str = "model.pt2") -> None:
        signature = json.loads((folder / "signature.json").read_text(encoding="utf-8"))
        self._sparse: list[str] = signature["sparse"]
        self._dense: list[str] = signature["dense"]
        # Requests are too small to benefit from several threads.
        torch.set_num_threads(1)
        self._model = torch.export.load(folder / program).module()
        self._lock = threading.Lock()

    def score(self, request: dict[str, Any], candidates: list[dict[str, Any]]) -> list[float]:
        """Return the predicted probability of each candidate, in order.

        Raises:
            KeyError: a feature is missing.
            ValueError: ``candidates`` is empty, a feature is in both ``request`` and a candidate,
                or ids are not integers.
        """
        if not candidates:
            raise ValueError("candidates: the list is empty. Send at least one candidate.")
        for name in (*self._sparse, *self._dense):
            if name in request and any(name in each for each in candidates):
                raise ValueError(f"{name}: sent in both request and candidates. Send it once.")
        every, once = torch.arange(len(candidates)), torch.zeros(len(candidates), dtype=torch.int64)
        values: dict[str, Tensor] = {}
        lengths: dict[str, Tensor] = {}
        rows: dict[str, Tensor] = {}
        for name in self._sparse:
            shared = name in request
            stored = [request[name]] if shared else [each[name] for each in candidates]
            ids = [id for ids in stored for id in ids]
            values[name] = torch.tensor(ids, dtype=None if ids else torch.int64)
            if values[name].dtype != torch.int64:
                raise ValueError(f"{name}: ids must be integers. Send a list of integers.")
            lengths[name] = torch.tensor([len(ids) for ids in stored])
            rows[name] = once if shared else every
        dense = torch.tensor(
            [[{**request, **each}[name] for name in self._dense] for each in candidates],
            dtype=torch.float64,
        )
        with torch.inference_mode(), self._lock:
            scores: list[float] = self._model(dense, values, lengths, rows).tolist()
        return scores


def server(scorer: Scorer, port: int = 0) -> ThreadingHTTPServer:
    """Return an HTTP server on localhost. Port 0 selects a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # keep connections open
        disable_nagle_algorithm = True  # avoids a 40 ms delay of short responses

        def do_POST(self) -> None:
            try:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer, status = {"scores": scorer.score(body["request"], body["candidates"])}, 200
            except KeyError as error:
                answer, status = {"error": f"feature {error} is missing"}, 400
            # torch raises RuntimeError, for example if an id is outside its table.
            except (ValueError, TypeError, IndexError, RuntimeError) as error:
                answer, status = {"error": str(error)}, 400
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Do nothing, because logging each request would slow down the server."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description="Serve an exported model over HTTP.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--program", default="model.pt2")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    with server(Scorer(options.folder, options.program), options.port) as running:
        print(f"http://127.0.0.1:{running.server_port}/score", flush=True)
        running.serve_forever()


if __name__ == "__main__":
    main()
