"""Training on tables as users have them: nested candidates as JSON lines, text with gaps as CSV."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from recd_plugins.api import RecdError
from recd_plugins.training.result import Result
from recd_plugins.training.session import session
from recd_plugins.training.trainer import Job

NESTED = """
version: 1
dataset:
  use: tables.table
  options:
    path: {folder}/requests.jsonl
    cache: {folder}/imports
    columns:
      reader.id: [session, id]
      reader.age: {{as: number, missing: 0}}
      at: {{as: [time, id], by: hour}}
      history: ids
      shown.news: id
      shown.clicked: label
    explode: [shown]
    split: {{by: time, test: 0.2}}
converter: {{use: {converter}}}
preprocessing:
  - use: tables.vocabulary
    features: [history, shown_news]
    options: {{rows: 200, shared: true}}
  - use: tables.vocabulary
    features: [reader_id]
    options: {{rows: 64, others: unknown}}
  - {{use: tables.standardise, features: ["*"]}}
model: {{embedding_dim: 4, num_embeddings: 200, bottom_mlp: [4], top_mlp: [4]}}
training: {{batch_size: 32, ranks: 1, steps: 8, evaluate: false}}
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "num_embeddings: 200",
            "num_embeddings: 150",
            r"'tables.vocabulary' produces up to 200 ids of feature 'history', but the table has",
        ),
        (
            "features: [reader_id]",
            "features: [at]",
            r"requests.jsonl: row \d+ \(from 0\), candidate \d, column 'reader_id': the id is",
        ),
    ],
)
def test_ids_that_do_not_fit_are_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    write_requests(tmp_path / "requests.jsonl")
    text = NESTED.format(folder=tmp_path, converter="recd.ikjt")
    with pytest.raises(RecdError, match=said):
        train(tmp_path, text.replace(old, new))


def write_requests(path: Path) -> None:
    rng = np.random.default_rng(0)
    with path.open("w") as lines:
        for number in range(120):
            reader = number % 40
            clicked = [int(at == number % 5) for at in range(5)]
            request = {
                "reader": {"id": f"r{reader}", "age": None if reader == 3 else 20 + reader},
                "at": f"2024-05-{1 + number // 40:02} {number % 24:02}:00:00",
                "history": [f"n{reader}-{at}" for at in range(4)],
                "shown": [{"news": f"n{rng.integers(90)}", "clicked": each} for each in clicked],
            }
            lines.write(json.dumps(request) + "\n")


def train(folder: Path, text: str) -> Result:
    path = folder / "registry.yaml"
    path.write_text(text, encoding="utf-8")
    with session(Job(path)) as trainer:
        return trainer.train("plugins")


def test_deduplicated_candidates_train_as_plain_ones(tmp_path):
    write_requests(tmp_path / "requests.jsonl")
    plain, packed = (
        train(tmp_path, NESTED.format(folder=tmp_path, converter=each))
        for each in ("recd.kjt", "recd.ikjt")
    )
    assert len(packed.losses) == 8
    assert packed.losses == pytest.approx(plain.losses, abs=1e-6)
    assert packed.ids_looked_up is not None
    assert plain.ids_looked_up is not None
    assert packed.ids_looked_up < 0.5 * plain.ids_looked_up
