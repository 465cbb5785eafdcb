"""The serving example: the commands of its README, small, and what its server answers."""

from __future__ import annotations

import http.client
import importlib
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests import forked

from recd_plugins.runtime.files import read_note, write_note

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

EXAMPLE = Path(__file__).parents[2] / "examples" / "serving"
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", (EXAMPLE / "README.md").read_text(), re.M | re.S)
#: Arguments that make the commands of the README small.
SMALL = {
    "make_requests.py": ["20"],
    "run": [
        *("training.ranks=1", "training.batch_size=64", "training.steps=3"),
        "callbacks=[{use: runs.publish, options: {folder: live, every: 2}}]",
    ],
    "predict": ["--ranks", "1"],
    "measure.py": ["--requests", "4", "--rounds", "1", "--cached"],
}


@pytest.fixture(scope="module")
def measure() -> Any:
    return imported("measure")


def imported(name: str) -> Any:
    sys.path.insert(0, str(EXAMPLE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the README's commands, except for those that install or ask the server."""
    folder = tmp_path_factory.mktemp("serving")
    for path in [*EXAMPLE.glob("*.py"), EXAMPLE / "registry.yaml"]:
        (folder / path.name).write_text(path.read_text())
    lines = [line for block in BLOCKS for line in block.splitlines()]
    ran = []
    for words in (shlex.split(line, comments=True) for line in lines if "'" not in line):
        if words[0] not in ("python", "recd") or words[1] == "serve.py":
            continue
        program = sys.executable if words[0] == "python" else forked.RECD
        command = [program, *words[1:], *SMALL.get(words[1], [])]
        run = forked.run if words[0] == "recd" else subprocess_run
        done = run(command, cwd=folder)
        assert done.returncode == 0, done.stderr
        ran.append(words[1])
    assert ran == ["make_requests.py", "run", "export", "predict", "measure.py"]
    (folder / "measured.json").write_text(done.stdout)
    return folder


def subprocess_run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def url(folder: Path, measure: Any) -> Iterator[str]:
    with measure.served(folder / "exported") as url:
        yield url


@pytest.fixture
def connection(url: str) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    yield connection
    connection.close()


def test_the_load_test_finds_no_errors(folder: Path) -> None:
    found = json.loads((folder / "measured.json").read_text())
    assert found["errors"] == 0
    assert found["largest_difference"] <= 1e-6
    assert found["requests_per_second"] > 0
    assert 0 < found["p50_ms"] <= found["p99_ms"]


@pytest.mark.parametrize("program", ["model.pt2", "model_int8.pt2", "candidates_int8.pt2"])
def test_programs(
    program: str, folder: Path, measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    scorer = imported("serve").Scorer(folder / "exported", program)
    scores = [json.loads(line)["score"] for line in (folder / "scores.jsonl").open()]
    within = 0.01 if "int8" in program else 1e-6
    expected = pytest.approx(scores[measure.CANDIDATES : 2 * measure.CANDIDATES], abs=within)
    _, sent = measure.bodies(folder / "data" / "test", 2)
    assert scorer.score(sent) == expected
    if program.startswith("model"):  # the whole program also takes histories with each candidate
        body = json.loads(sent)
        rows = [{**body["request"], **row} for row in body["candidates"]]
        assert scorer.score(json.dumps({"candidates": rows}).encode()) == expected


def test_users_are_cached(folder: Path, measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    serve = imported("serve")
    scorer = serve.Scorer(folder / "exported", cache_size=2)
    scores = [json.loads(line)["score"] for line in (folder / "scores.jsonl").open()]
    sent = measure.bodies(folder / "data" / "test", 2)
    expected = [scores[: measure.CANDIDATES], scores[measure.CANDIDATES : 2 * measure.CANDIDATES]]
    keyed, later = measure.cached(sent)
    for bodies in (sent, keyed, later, later):
        for body, wanted in zip(bodies, expected, strict=True):
            assert scorer.score(body) == pytest.approx(wanted, abs=1e-6)
    changed = {**json.loads(sent[1]), "key": 0}  # another user with a known key
    assert scorer.score(json.dumps(changed).encode()) == pytest.approx(expected[1], abs=1e-6)
    del changed["request"]
    assert scorer.score(json.dumps(changed).encode()) == pytest.approx(expected[1], abs=1e-6)
    scorer.score(json.dumps({**json.loads(sent[0]), "key": "new"}).encode())  # evicts key 1
    with pytest.raises(serve.UnknownKeyError, match="Key 1 is not cached"):
        scorer.score(later[1])


def test_it_follows_a_model(folder: Path, measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    current = folder / "live" / "current.json"
    newest = read_note(current)
    write_note(current, {**newest, "deltas": newest["deltas"][:1]})
    serve = imported("serve")
    scorer = serve.Scorer(folder / "live", follow=1_000)
    scores = [json.loads(line)["score"] for line in (folder / "scores.jsonl").open()]
    expected = pytest.approx(scores[: measure.CANDIDATES], abs=1e-6)
    (keyed,), (later,) = measure.cached(measure.bodies(folder / "data" / "test", 1))
    assert scorer.score(keyed) != expected  # of step 2
    write_note(current, newest)
    assert scorer.live.update() == 1
    assert scorer.score(later) == expected  # the cached user side is of step 2
    scorer.live.close()


def test_the_readme_asks_the_server(measure: Any, connection: http.client.HTTPConnection) -> None:
    (body,) = re.findall(r"curl -d '(.*?)'", "".join(BLOCKS), re.S)
    status, answer = measure.post(connection, body.encode())
    assert (status, len(answer["scores"])) == (200, 2)


ITEM = '{"item": [1], "category": [1], "price": 0.5}'
USER = '{"user": [1], "history": [1], "history_category": [1]}'
WRONG = {
    "empty": ("", 400, "The body is not JSON"),
    "cut": ('{"request": ', 400, "The body is not JSON"),
    "deep": ("[" * 100_000, 400, "The body is not JSON"),
    "list": ("[]", 400, "The body has the wrong form"),
    "none": (f'{{"request": {USER}, "candidates": []}}', 400, "list of candidates is empty"),
    "null": (f'{{"request": {USER}, "candidates": [null]}}', 400, "candidate 0 is not an object"),
    "request": (f'{{"request": [], "candidates": [{ITEM}]}}', 400, "not an object"),
    "missing": (
        f'{{"request": {{}}, "candidates": [{ITEM}]}}',
        400,
        "request: column 'user' is missing. Add the column.",
    ),
    "missing item": (
        f'{{"request": {USER}, "candidates": [{{"item": [1], "price": 0.5}}]}}',
        400,
        "candidate 0: column 'category' is missing. Add the column to the candidate or to request",
    ),
    "part of the user": (
        f'{{"key": 1, "request": {{"user": [1]}}, "candidates": [{ITEM}]}}',
        400,
        "request: column 'history' is missing",
    ),
    "unknown key": (f'{{"key": "u", "candidates": [{ITEM}]}}', 404, "Key 'u' is not cached"),
    "wrong key": (f'{{"key": [1], "candidates": [{ITEM}]}}', 400, "Send a user or request id"),
    "user only": (f'{{"key": 1, "request": {USER}}}', 400, "The body has the wrong form"),
    "key": (f'{{"shared": {USER}, "candidates": [{ITEM}]}}', 400, "Unknown key 'shared'"),
    "misspelt": (ITEM[:-1] + ', "categry": [1]}', 400, "'categry'. Did you mean 'category'?"),
    "NaN": (ITEM.replace("0.5", "NaN"), 400, "NaN is not a JSON number; send null"),
    "unknown": (ITEM[:-1] + ', "lengths": [-1]}', 400, "unknown column 'lengths'. Remove"),
    "infinity": (ITEM.replace("0.5", "-Infinity"), 400, "-Infinity is not a JSON number"),
    "overflow": (ITEM.replace("0.5", "1e999"), 400, "needs a finite float32 number"),
    "large": (ITEM.replace("0.5", "1e39"), 400, "needs a finite float32 number"),
    "digits": (ITEM.replace("0.5", "9" * 5000), 400, "not JSON"),
    "null price": (ITEM.replace("0.5", "null"), 400, "needs a finite float32 number"),
    "text": (ITEM.replace("0.5", '"cheap"'), 400, "needs a number"),
    "float id": (ITEM.replace("[1]", "[1.5]"), 400, "Ids of this column are integers"),
    "large id": (ITEM.replace("[1]", "[1e30]"), 400, "Send an integer"),
    "64 bits": (ITEM.replace("[1]", f"[{2**63}]"), 400, "64-bit integers"),
    "no such row": (ITEM.replace("[1]", "[1000000000]"), 400, "outside its embedding table"),
    "negative": (ITEM.replace("[1]", "[-1]"), 400, "outside its embedding table"),
    "object": (ITEM.replace("[1]", '{"lengths": -1}'), 400, "needs a list of ids"),
    "twice": (ITEM[:-1] + ', "user": [1]}', 400, "'user' is a user feature. Move the column to"),
    "too large": (" " * (1 << 19), 413, "The body has over 262144 bytes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input(name: str, measure: Any, connection: http.client.HTTPConnection) -> None:
    text, expected, told = WRONG[name]
    if text.startswith('{"item"'):
        text = f'{{"request": {USER}, "candidates": [{text}]}}'
    status, answer = measure.post(connection, text.encode())
    assert status == expected, answer
    assert told in answer["error"]
    good = f'{{"request": {USER}, "candidates": [{ITEM}]}}'
    assert measure.post(connection, good.encode())[0] == 200


def test_a_wrong_folder_is_told(tmp_path: Path) -> None:
    done = subprocess_run([sys.executable, str(EXAMPLE / "serve.py"), "runs"], tmp_path)
    assert done.returncode == 2
    assert "runs: no model.pt2. Pass the output folder of recd export." in done.stderr


def test_other_paths_are_answered_in_json(connection: http.client.HTTPConnection) -> None:
    for path, status in (("/score", 405), ("/x", 404), ("/health", 200)):
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.status == status
        assert set(json.loads(response.read())) == {"status" if status == 200 else "error"}


def test_a_stream_without_an_end_is_answered(connection: http.client.HTTPConnection) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * (1 << 15)

    connection.request("POST", "/score", parts(), encode_chunked=True)
    assert connection.getresponse().status == 413


def test_sigterm_lets_a_request_finish(folder: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "serve.py"), "exported", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        address = urlsplit(process.stdout.readline().strip())
        body = f'{{"request": {USER}, "candidates": [{ITEM}]}}'.encode()
        with socket.create_connection((address.hostname, address.port), timeout=30) as client:
            head = f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body[:10])
            time.sleep(1)
            process.send_signal(signal.SIGTERM)
            time.sleep(1)
            assert process.poll() is None
            client.sendall(body[10:])
            answer = client.recv(10_000)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert process.wait(20) in (0, -signal.SIGTERM)
