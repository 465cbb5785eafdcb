"""An HTTP server that scores the candidates of a request with an exported model.

pip install torch uvicorn starlette
python serve.py exported --port 8000

POST /score accepts {"request": {...}, "candidates": [{...}, ...]} and returns {"scores": [...]}.
A model of several labels returns {"scores": {LABEL: [...], ...}}.
Put a column into "request" if all candidates share its value, otherwise into every candidate. User
features belong to "request". With "key": "user 7", their vectors are cached. Later requests with
this key may leave them out, until 404 asks for them again.
Bad input is answered with status 4xx and {"error": "..."}. GET /health answers once the model is
loaded. SIGTERM and Ctrl-C let running requests finish.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import socket
import sys
from collections import OrderedDict
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
        program: file name of the exported program in ``folder``, the whole one or a candidates
            program. By default ``candidates.pt2``, or ``model.pt2`` without user features.
        cache_size: number of keys for which the results of the user program are cached.
    """

    def __init__(self, folder: Path, program: str | None = None, cache_size: int = 1_000) -> None:
        sys.path.insert(0, str(folder))
        from encode import Encoder

        self._encoder = Encoder(folder, strict=True, row="candidate", shared="request")
        signature = json.loads((folder / "signature.json").read_text(encoding="utf-8"))
        self._tasks = [task["name"] for task in signature.get("tasks", ())]
        program = program or default_program(folder)
        self._model = torch.export.load(folder / program).module()
        self._user: Any = None
        if program.startswith("candidates"):
            of_user = program.replace("candidates", "user")
            self._user = torch.export.load(folder / of_user).module()
        # User columns and the result of the user program, by key.
        self._cache: OrderedDict[str | int, tuple[dict[str, Any], Any]] = OrderedDict()
        self._cache_size = cache_size
        # A full garbage collection would scan the programs' graphs for half a second.
        gc.collect()
        gc.freeze()

    def score(self, body: bytes) -> list[float] | dict[str, list[float]]:
        """Return the probability of each candidate of a JSON request, in order.

        For a model of several labels, return the predictions of each label, by name.

        Raises:
            ValueError: the request is wrong. The message says what to change.
            UnknownKeyError: the request has no user features, and its key is not cached.
        """
        # Requests are too small for several threads. OpenMP has a setting per calling thread.
        torch.set_num_threads(1)
        try:
            sent = json.loads(body, parse_constant=_reject)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"The body is not JSON: {error}. Correct the body.") from error
        if not isinstance(sent, dict) or not isinstance(sent.get("candidates"), list):
            form = '{"request": {...}, "candidates": [{...}, ...]}'
            raise ValueError(f"The body has the wrong form. Send {form}.")
        if unknown := sent.keys() - {"key", "request", "candidates"}:
            names = "key, request and candidates"
            raise ValueError(f"Unknown key {min(unknown)!r}. Use only {names}.")
        key, candidates = sent.get("key"), sent["candidates"]
        request = {} if sent.get("request") is None else sent["request"]
        if type(key) not in (str, int, type(None)):
            raise ValueError("The key is neither a text nor an integer. Send a user or request id.")
        try:
            with torch.inference_mode():
                if self._user is None:
                    scores = self._model(*self._encoder.encode(candidates, request).tensors())
                else:
                    inputs = self._encoder.encode_candidates(candidates, request).tensors()
                    scores = self._model(self._vectors(key, request), *inputs)
        except IndexError as error:
            raise ValueError("An id is outside its embedding table. Send a known id.") from error
        if not scores.isfinite().all():
            raise ValueError("A score is not finite. Send smaller numbers.")
        if self._tasks:
            return dict(zip(self._tasks, scores.T.tolist(), strict=True))
        found: list[float] = scores.tolist()
        return found

    def _vectors(self, key: str | int | None, request: dict[str, Any]) -> Any:
        """Return the result of the user program for a request, or from the cache."""
        columns = self._encoder.user_columns(request)
        cached = None if key is None else self._cache.get(key)
        if key is not None and cached is None and not columns:
            raise UnknownKeyError(f"Key {key!r} is not cached. Also send the user features.")
        if cached is None or (columns and columns != cached[0]):
            cached = columns, self._user(*self._encoder.encode_user(request).tensors())
        if key is not None:
            self._cache[key] = cached
            self._cache.move_to_end(key)
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return cached[1]


class UnknownKeyError(ValueError):
    """The results for a key are not cached."""


def default_program(folder: Path) -> str:
    return "candidates.pt2" if (folder / "candidates.pt2").is_file() else "model.pt2"


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
        except UnknownKeyError as error:
            raise HTTPException(404, str(error)) from error
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
    parser.add_argument(
        "--program", help="model.pt2, or a candidates program. Default: candidates.pt2, if written."
    )
    parser.add_argument("--cache-size", type=int, default=1_000, help="Number of cached keys.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 selects a free port.")
    options = parser.parse_args()
    program = options.program or default_program(options.folder)
    for name in (program, "signature.json", "encode.py"):
        if not (options.folder / name).is_file():
            parser.error(f"{options.folder}: no {name}. Pass the output folder of recd export.")
    settings: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": GRACE_SECONDS}
    config = uvicorn.Config(
        application(Scorer(options.folder, program, options.cache_size)),
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
