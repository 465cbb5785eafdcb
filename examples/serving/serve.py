"""An HTTP server that scores the candidates of a request with an exported model.

pip install torch uvicorn starlette
python serve.py exported --port 8000
python serve.py live --follow 1          # follows a run; also needs recd-plugins-core

POST /score accepts {"request": {...}, "candidates": [{...}, ...]} and returns {"scores": [...]}.
A model of several labels returns {"scores": {LABEL: [...], ...}}.
Put a column into "request" if all candidates share its value, otherwise into every candidate. User
features belong to "request". With "key": "user 7", their vectors are cached. Later requests with
this key may leave them out, until 404 asks for them again.
Bad input is answered with status 4xx and {"error": "..."}. GET /health answers once the model is
loaded, with --follow also the seconds since its last training step. SIGTERM and Ctrl-C let running
requests finish.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Programs:
    """An exported model.

    Attributes:
        folder: folder of the programs.
        encoder: the Encoder of ``encode.py``.
        tasks: names of the labels, if there are several.
        model: the whole program or the candidates program.
        user: the user program, for a candidates program.
    """

    folder: Path
    encoder: Any
    tasks: list[str]
    model: Any
    user: Any

    @classmethod
    def of(cls, folder: Path, program: str, load: Callable[[str], Any]) -> Programs:
        """Return the programs of a folder. ``load`` loads a program by its file name."""
        sys.path.insert(0, str(folder))
        sys.modules.pop("encode", None)
        from encode import Encoder

        sys.path.remove(str(folder))
        encoder = Encoder(folder, strict=True, row="candidate", shared="request")
        signature = json.loads((folder / "signature.json").read_text(encoding="utf-8"))
        tasks = [task["name"] for task in signature.get("tasks", ())]
        has_user = program.startswith("candidates")
        user = load(program.replace("candidates", "user")) if has_user else None
        return cls(folder, encoder, tasks, load(program), user)


class Scorer:
    """Scores candidates with an exported model.

    Args:
        folder: output folder of ``recd export``, or of the callback ``runs.publish``.
        program: file name of the exported program in ``folder``, the whole one or a candidates
            program. By default ``candidates.pt2``, or ``model.pt2`` without user features.
        cache_size: number of keys for which the results of the user program are cached.
        follow: seconds between updates of a published model; None for an exported model.
    """

    def __init__(
        self,
        folder: Path,
        program: str | None = None,
        cache_size: int = 1_000,
        follow: float | None = None,
    ) -> None:
        self._program, self.live = program, None
        if follow is None:
            self._programs = Programs.of(
                folder,
                program or default_program(folder),
                lambda name: torch.export.load(folder / name).module(),
            )
        else:
            from recd_plugins.serving import LiveModel

            self.live = LiveModel(folder)
            with self.live.version() as version:
                self._programs = self._of_version(version)
            self.live.follow(follow)
        # User columns, the version of the model, and the result of the user program, by key.
        self._cache: OrderedDict[str | int, tuple[dict[str, Any], int, Any]] = OrderedDict()
        self._cache_size = cache_size
        # A full garbage collection would scan the programs' graphs for half a second.
        gc.collect()
        gc.freeze()

    @contextmanager
    def _version(self) -> Iterator[tuple[Programs, int]]:
        """Yield the programs and their version, which do not change in this context."""
        if self.live is None:
            yield self._programs, 0
            return
        with self.live.version() as version:
            if self._programs.folder != version.folder:  # of a new run
                self._programs = self._of_version(version)
            yield self._programs, version.sequence

    def _of_version(self, version: Any) -> Programs:
        program = self._program or default_program(version.folder)
        return Programs.of(version.folder, program, version.programs.__getitem__)

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
            with torch.inference_mode(), self._version() as (programs, version):
                encoder, tasks = programs.encoder, programs.tasks
                if programs.user is None:
                    scores = programs.model(*encoder.encode(candidates, request).tensors())
                else:
                    inputs = encoder.encode_candidates(candidates, request).tensors()
                    scores = programs.model(self._vectors(programs, version, key, request), *inputs)
        except IndexError as error:
            raise ValueError("An id is outside its embedding table. Send a known id.") from error
        if not scores.isfinite().all():
            raise ValueError("A score is not finite. Send smaller numbers.")
        if tasks:
            return dict(zip(tasks, scores.T.tolist(), strict=True))
        found: list[float] = scores.tolist()
        return found

    def _vectors(
        self, programs: Programs, version: int, key: str | int | None, request: dict[str, Any]
    ) -> Any:
        """Return the result of the user program for a request, or from the cache."""
        columns = programs.encoder.user_columns(request)
        cached = None if key is None else self._cache.get(key)
        if key is not None and cached is None and not columns:
            raise UnknownKeyError(f"Key {key!r} is not cached. Also send the user features.")
        if cached is not None and not columns:
            columns = cached[0]
        if cached is None or (columns, version) != cached[:2]:
            request = {**request, **columns}
            cached = (
                columns,
                version,
                programs.user(*programs.encoder.encode_user(request).tensors()),
            )
        if key is not None:
            self._cache[key] = cached
            self._cache.move_to_end(key)
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return cached[2]


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
        if (live := scorer.live) is None:
            return JSONResponse({"status": "ok"})
        with live.version() as version:
            state = {"version": version.sequence, "step": version.step}
        seconds = {"seconds_since_training": live.freshness, "problem": live.problem}
        return JSONResponse({"status": "ok", **state, **seconds})

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
        "--follow",
        type=float,
        metavar="SECONDS",
        help="Serve the folder of runs.publish, and apply new versions after so many seconds.",
    )
    parser.add_argument(
        "--program", help="model.pt2, or a candidates program. Default: candidates.pt2, if written."
    )
    parser.add_argument("--cache-size", type=int, default=1_000, help="Number of cached keys.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 selects a free port.")
    options = parser.parse_args()
    needed = [options.program or default_program(options.folder), "signature.json", "encode.py"]
    for name in needed if options.follow is None else ["current.json"]:
        if not (options.folder / name).is_file():
            source = "recd export" if options.follow is None else "runs.publish"
            parser.error(f"{options.folder}: no {name}. Pass the output folder of {source}.")
    settings: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": GRACE_SECONDS}
    config = uvicorn.Config(
        application(Scorer(options.folder, options.program, options.cache_size, options.follow)),
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
