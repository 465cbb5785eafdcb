"""An HTTP server that scores the candidates of a request with an exported model.

pip install torch uvicorn starlette
python serve.py exported --port 8000

POST /score accepts {"request": {...}, "candidates": [{...}, ...]} and returns {"scores": [...]}.
A model of several labels returns {"scores": {LABEL: [...], ...}}.
Put a column into "request" if all candidates share its value, otherwise into every candidate.
Bad input is answered with status 4xx and {"error": "..."}. GET /health answers once the model is
loaded. SIGTERM and Ctrl-C let running requests finish.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import anyio
import anyio.to_thread
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

MAX_BYTES = 1 << 18  # of a request's body
BODY_SECONDS = 10
GRACE_SECONDS = 10


class Scorer:
    """Scores candidates with an exported model.

    Args:
        folder: output folder of ``recd export``.
        program: file name of the exported program in ``folder``.
    """

    def __init__(self, folder: Path, program: str = "model.pt2") -> None:
        sys.path.insert(0, str(folder))
        from encode import Encoder

        # Requests are too small to benefit from several threads.
        torch.set_num_threads(1)
        self._encoder = Encoder(folder, strict=True, row="candidate", shared="request")
        signature = json.loads((folder / "signature.json").read_text(encoding="utf-8"))
        self._tasks = [task["name"] for task in signature.get("tasks", ())]
        self._model = torch.export.load(folder / program).module()

    def score(self, body: bytes) -> list[float] | dict[str, list[float]]:
        """Return the probability of each candidate of a JSON request, in order.

        For a model of several labels, return the predictions of each label, by name.

        Raises:
            ValueError: the request is wrong. The message says what to change.
        """
        try:
            sent = json.loads(body, parse_constant=_reject)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"The body is not JSON: {error}. Correct the body.") from error
        if not isinstance(sent, dict) or not isinstance(sent.get("candidates"), list):
            form = '{"request": {...}, "candidates": [{...}, ...]}'
            raise ValueError(f"The body has the wrong form. Send {form}.")
        if unknown := sent.keys() - {"request", "candidates"}:
            raise ValueError(f"Unknown key {min(unknown)!r}. Use only request and candidates.")
        inputs = self._encoder.encode(sent["candidates"], sent.get("request")).tensors()
        try:
            with torch.inference_mode():
                scores = self._model(*inputs)
        except IndexError as error:
            raise ValueError("An id is outside its embedding table. Send a known id.") from error
        if not scores.isfinite().all():
            raise ValueError("A score is not finite. Send smaller numbers.")
        if self._tasks:
            return dict(zip(self._tasks, scores.T.tolist(), strict=True))
        found: list[float] = scores.tolist()
        return found


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number; send null for a missing value")


def application(scorer: Scorer) -> Starlette:
    """Return the ASGI application."""
    # One request is scored at a time, while the event loop reads others and answers errors.
    one_by_one = anyio.CapacityLimiter(1)

    async def score(request: Request) -> JSONResponse:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(request)
            scores = await anyio.to_thread.run_sync(scorer.score, body, limiter=one_by_one)
        except TimeoutError as error:
            raise HTTPException(408, f"The body took over {BODY_SECONDS} s.") from error
        except (ClientDisconnect, ValueError) as error:
            raise HTTPException(400, str(error)) from error
        return JSONResponse({"scores": scores})

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    def failed(_: Request, error: Exception) -> JSONResponse:
        told = isinstance(error, HTTPException)
        status, text = (error.status_code, error.detail) if told else (500, "Internal error.")
        return JSONResponse({"error": text}, status, error.headers if told else None)

    routes = [Route("/score", score, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes, exception_handlers={HTTPException: failed, Exception: failed})


async def _body(request: Request) -> bytes:
    parts, size = [], int(request.headers.get("Content-Length", 0))
    if size <= MAX_BYTES:
        size = 0
        async for part in request.stream():
            parts.append(part)
            if (size := size + len(part)) > MAX_BYTES:
                break
    if size > MAX_BYTES:
        raise HTTPException(413, f"The body has over {MAX_BYTES} bytes. Send fewer candidates.")
    return b"".join(parts)


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description="Serve an exported model over HTTP.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--program", default="model.pt2")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 selects a free port.")
    options = parser.parse_args()
    for name in (options.program, "signature.json", "encode.py"):
        if not (options.folder / name).is_file():
            parser.error(f"{options.folder}: no {name}. Pass the output folder of recd export.")
    settings: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": GRACE_SECONDS}
    config = uvicorn.Config(
        application(Scorer(options.folder, options.program)),
        host=options.host,
        port=options.port,
        **settings,
    )
    listener = config.bind_socket()
    # Connections inherit this option. Without it, each answer is 40 ms late.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.listen()  # clients may connect once the URL is printed
    print(f"http://{options.host}:{listener.getsockname()[1]}/score", flush=True)
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
