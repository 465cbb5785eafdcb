from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from ruamel.yaml import YAML
from tests import forked
from tests.commands import recd, refusal

EXAMPLE = Path(__file__).parents[2] / "examples" / "implicit"
RANK = ["--user", "user_id", "--seen", "history_seen"]


@pytest.fixture
def folder(cwd: Path) -> Path:
    """Sixty users, each of whom rates the films of one of six kinds, twelve of them in a row."""
    for path in EXAMPLE.glob("*.*"):
        shutil.copy(path, cwd)
    random = np.random.default_rng(0)
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for user in range(60):
        films = 1 + user % 6 * 20 + (random.integers(20) + np.arange(12)) % 20
        lines += [f"{user}\t{film}\t1\t{100 * user + 7 * i}" for i, film in enumerate(films)]
    (cwd / "data").mkdir()
    (cwd / "data" / "ml-100k.inter").write_text("\n".join(lines) + "\n")
    return cwd


def train_small(folder: Path, name: str, batch_size: int, rate: float, **options: object) -> None:
    """Eleven steps an epoch, on one rank; ``options`` are of the model."""
    yaml = YAML()
    document = yaml.load(folder / name)
    small = {"batch_size": batch_size, "ranks": 1, "epochs": 8, "schedule": None}
    document["training"] |= {**small, "learning_rate": rate}
    document["model"]["options"] |= options
    yaml.dump(document, folder / name)
    forked.run([forked.RECD, "run", name], cwd=folder, check=True)


def ranked(*arguments: str) -> dict[str, float]:
    recd("rank", *arguments, *RANK, "--json", "figures.json")
    figures: dict[str, float] = json.loads(Path("figures.json").read_text())
    assert figures["num_queries"] == 60
    return figures


def places_by_hand(folder: Path) -> NDArray[np.int64]:
    items = pq.read_table(folder / "vectors" / "items.parquet")
    users = pq.read_table(folder / "vectors" / "users.parquet")
    vectors, wanted = (np.array(each["vector"].to_pylist()) for each in (items, users))
    scores = wanted @ vectors.T
    ids = items["item"].to_numpy()
    had: dict[int, set[int]] = {}
    for line in (folder / "data" / "ml-100k.inter").read_text().splitlines()[1:]:
        user, film, *_ = map(int, line.split())
        had.setdefault(user, set()).add(film)
    places = []
    for row, ((user,), own) in enumerate(
        zip(users["user"].to_pylist(), users["item"].to_pylist(), strict=True)
    ):
        others = ~np.isin(ids, list(had[user]))
        places.append(1 + (scores[row, others] > scores[row, ids == own]).sum())
    return np.array(places)


def test_two_towers_find_films_of_the_users_kind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train_small(folder, "registry.yaml", 300, 0.3)
    figures = ranked("registry.yaml", "--vectors", "vectors")
    # Eight of a kind that the user had not, of 120 films.
    assert figures["hr_at_10"] > 0.25
    assert figures["num_items"] == 120
    assert ranked("registry.yaml", "--vectors", "vectors", "--force") == figures
    places = places_by_hand(folder)
    assert figures["mrr"] == pytest.approx((1 / places).mean())
    assert figures["recall_at_10"] == pytest.approx((places <= 10).mean())
    said = refusal("rank", "registry.yaml", "--item", "history_seen")
    assert "ranks the ids of feature 'item_id' only" in said
    said = refusal("rank", "registry.yaml", "--user", "user")
    assert "the dataset has no sparse feature 'user'" in said
    monkeypatch.setattr("sys.argv", ["retrieve.py", "vectors"])
    runpy.run_path(str(folder / "retrieve.py"), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_sequence_model_finds_the_next_film(folder: Path) -> None:
    train_small(folder, "sasrec.yaml", 50, 0.1, dropout=0.1)
    everything = ranked("sasrec.yaml")
    drawn = ranked("sasrec.yaml", "--sampled", "20")
    assert everything["hr_at_10"] > 0.18
    assert everything["mrr"] < drawn["mrr"]
    said = refusal("rank", "registry.yaml", *RANK)
    assert "there is no checkpoint in this folder" in said
