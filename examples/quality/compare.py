"""Compares the model of `recd init` with LightGBM and logistic regression, on the same split.

python compare.py criteo
python compare.py requests

All three train on train.parquet and score test.parquet, which has the latest tenth of the rows.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import scipy.sparse
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.preprocessing import StandardScaler

NUMBERS = [f"int_{i}" for i in range(13)]
CATEGORIES = [f"cat_{i}" for i in range(26)]


def criteo(rows: int, path: Path | None) -> pd.DataFrame:
    """Read the first rows of a file in Criteo's format, or draw rows with the same columns.

    A quarter of the drawn rows are clicked. Half of the variance of their log-odds comes from
    single ids, a quarter from steps in the numbers, and a quarter from pairs of ids.
    """
    if path is not None:
        names = ["label", *NUMBERS, *CATEGORIES]
        types = dict.fromkeys(NUMBERS, "float64") | dict.fromkeys(CATEGORIES, "str")
        return pd.read_csv(path, sep="\t", names=names, dtype=types, nrows=rows)
    draw = np.random.default_rng(0)
    single, steps = np.zeros(rows), np.zeros(rows)
    total, squares = np.zeros((rows, 4)), np.zeros((rows, 4))
    table: dict[str, NDArray[Any]] = {}
    sizes = np.geomspace(4, 100_000, len(CATEGORIES)).astype(int)
    for name, size in zip(CATEGORIES, draw.permutation(sizes), strict=True):
        shares = np.arange(1, size + 1) ** -1.1
        ids = draw.choice(size, rows, p=shares / shares.sum())
        vectors = draw.normal(size=(size, 4))[ids]
        single += draw.normal(size=size)[ids]
        total, squares = total + vectors, squares + vectors**2
        codes = np.array([f"{code:08x}" for code in draw.integers(1 << 32, size=size)], object)
        table[name] = np.where(draw.random(rows) < 0.05, None, codes[ids])
    for name in NUMBERS:
        values = np.floor(draw.lognormal(2, 1.5, rows))
        steps += draw.normal(size=6)[np.searchsorted([1, 3, 8, 20, 60], values)]
        table[name] = np.where(draw.random(rows) < 0.2, np.nan, values)
    pairs = (total**2 - squares).sum(1)
    parts = ((0.5, single), (0.25, steps), (0.25, pairs))
    logits = 1.3 * sum(w**0.5 * (part - part.mean()) / part.std() for w, part in parts)
    labels = draw.random(rows) < 1 / (1 + np.exp(1.4 - logits))
    return pd.DataFrame({"label": labels.astype(int), **table})


def requests(rows: int, folder: Path) -> pd.DataFrame:
    """Draw requests of 38 candidates with examples/serving/make_requests.py."""
    script = Path(__file__).parents[1] / "serving/make_requests.py"
    num_requests = rows // 38 * 5 // 6  # the script adds a fifth as many for its test split
    subprocess.run([sys.executable, script, folder, str(num_requests)], check=True)
    table = pd.concat(pd.read_parquet(folder / split) for split in ("train", "test"))
    for name in ("user", "item", "category"):
        table[name] = table[name].str[0]
    return table.drop(columns="ts").reset_index(drop=True)  # rows are in order of time


def flat(table: pd.DataFrame, counts: bool) -> pd.DataFrame:
    """Drop lists, or replace each by how often it contains the row's item or category."""
    unused = ["label", "session_id", *([] if counts else ["history", "history_category"])]
    table = table.drop(columns=unused, errors="ignore")
    for lists, ids in (("history", "item"), ("history_category", "category")):
        if lists in table:
            pairs = zip(table[lists], table[ids], strict=True)
            table[lists] = [float((ids_of == one).sum()) for ids_of, one in pairs]
    return table


def ours(folder: Path) -> NDArray[Any]:
    """Train the model of `recd init` and score the test rows, as a user would."""
    recd = Path(sys.executable).with_name("recd")
    for words in (
        "init train.parquet model.yaml --label label --test 0 --force",
        "run model.yaml",
        "predict model.yaml test.parquet -o scores.parquet --force",
    ):
        done = subprocess.run([recd, *words.split()], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"recd {words}\n{done.stderr}")
    return pd.read_parquet(folder / "scores.parquet")["score"].to_numpy()


class Peers:
    """LightGBM and logistic regression, on numbers and on codes of ids seen at least 5 times."""

    def __init__(self, train: pd.DataFrame, test: pd.DataFrame, counts: bool = True) -> None:
        self.labels = train["label"].to_numpy()
        both = flat(pd.concat([train, test], ignore_index=True), counts)
        self.ids = [n for n in both if n in (*CATEGORIES, "user", "item", "category")]
        self.numbers = both.drop(columns=self.ids).astype("float64")
        self.codes = {}
        for name in self.ids:
            counts = train[name].value_counts()
            self.codes[name] = counts[counts >= 5].index.get_indexer(both[name]) + 1

    def lightgbm(self) -> NDArray[Any]:
        """Stop when the log loss of the latest tenth of the training rows no longer falls."""
        num, columns = len(self.labels), pd.DataFrame({**self.numbers, **self.codes})
        cut = num * 9 // 10
        parameters = {"objective": "binary", "learning_rate": 0.05, "verbosity": -1, "seed": 0}
        data = lightgbm.Dataset(columns[:cut], self.labels[:cut], categorical_feature=self.ids)
        valid = data.create_valid(columns[cut:num], self.labels[cut:])
        stop = lightgbm.early_stopping(30, verbose=False)
        model = lightgbm.train(parameters, data, 2000, valid_sets=[valid], callbacks=[stop])
        return np.asarray(model.predict(columns[num:]))

    def logistic_regression(self) -> NDArray[Any]:
        """Use one-hot ids, and log(1 + number)."""
        num = len(self.labels)
        numbers = np.log1p(self.numbers.fillna(0).clip(lower=0))
        numbers = StandardScaler().fit(numbers[:num]).transform(numbers)
        hot = [
            scipy.sparse.csr_array((np.ones(len(code)), code, np.arange(len(code) + 1)))
            for code in self.codes.values()
        ]
        columns = scipy.sparse.hstack([scipy.sparse.csr_array(numbers), *hot]).tocsr()
        model = LogisticRegression(C=0.1, max_iter=500).fit(columns[:num], self.labels)
        return np.asarray(model.predict_proba(columns[num:])[:, 1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("table", choices=["criteo", "requests"])
    parser.add_argument("--data", type=Path, help="file in Criteo's format, such as train.txt")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--folder", type=Path, default=Path("compared"))
    options = parser.parse_args()
    folder = options.folder / options.table
    folder.mkdir(parents=True, exist_ok=True)
    if options.table == "criteo":
        table = criteo(options.rows, options.data)
    else:
        table = requests(options.rows, folder / "drawn")
    cut = len(table) * 9 // 10 // 38 * 38  # whole requests
    train, test = table[:cut], table[cut:]
    train.to_parquet(folder / "train.parquet")
    test.to_parquet(folder / "test.parquet")
    labels = test["label"].to_numpy()
    print(f"{len(train):,} rows to train, {len(test):,} to test, {labels.mean():.1%} clicked")
    print(f"{'':20} {'log loss':>9} {'AUC':>7} {'seconds':>8} {'CPU s':>6}")

    def show(name: str, scores: NDArray[Any], seconds: float = 0, cpu: float = 0) -> None:
        figures = f"{log_loss(labels, scores):9.4f} {roc_auc_score(labels, scores):7.4f}"
        print(f"{name:20} {figures} {seconds:8.1f} {cpu:6.1f}", flush=True)

    show("mean label", np.full(len(labels), train["label"].mean()))
    for name, score in (
        ("recd init", lambda: ours(folder)),
        ("LightGBM", lambda: Peers(train, test).lightgbm()),
        ("logistic regression", lambda: Peers(train, test).logistic_regression()),
        ("LightGBM, no lists", lambda: Peers(train, test, counts=False).lightgbm()),
    ):
        if name.endswith("no lists") and options.table == "criteo":
            continue
        start, used = time.perf_counter(), sum(os.times()[:4])
        show(name, score(), time.perf_counter() - start, sum(os.times()[:4]) - used)


if __name__ == "__main__":
    main()
