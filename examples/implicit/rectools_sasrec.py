"""Trains and evaluates SASRec of RecTools on an interaction log in RecBole's format.

    pip install "rectools[torch]"
    python rectools_sasrec.py data/ml-100k.inter --seed 1 --json peer.json

The last event of each user is the test event. The event before it is the validation event, used to
choose the best epoch. Items that a user has already seen are not ranked.
"""

import argparse
import json

import numpy as np
import pandas as pd
import torch
from pytorch_lightning import Trainer, seed_everything
from rectools.dataset import Dataset
from rectools.models import SASRecModel

SAMPLED = 100


def dataset(events):
    return Dataset.construct(events[["user_id", "item_id", "weight", "datetime"]])


def target_places(model, seen, target):
    """Return the rank of each target item, and the number of ranked items, for each user.

    Ranks start at 1 and exclude items that the user has seen. An item unseen in training has NaN.
    """
    ranked = model.recommend(
        users=target["user_id"].to_numpy(),
        dataset=dataset(seen),
        k=int(seen["item_id"].nunique()),
        filter_viewed=True,
    )
    wanted = ranked["user_id"].map(target.set_index("user_id")["item_id"])
    found = ranked[ranked["item_id"] == wanted].set_index("user_id")["rank"]
    counts = ranked.groupby("user_id").size()
    users = target["user_id"]
    # The rank is NaN if training never saw the target item.
    return found.reindex(users).to_numpy(np.float64), counts.reindex(users).to_numpy()


def figures(places):
    hits = places <= 10
    gains = np.where(hits, 1 / np.log2(np.where(hits, places, 1) + 1), 0)
    return {"hr_at_10": float(hits.mean()), "ndcg_at_10": float(gains.mean())}


def sampled(places, counts, seed):
    """Return the ranks of the targets among ``SAMPLED`` other items, drawn without replacement."""
    generator = np.random.default_rng(seed)
    better = np.nan_to_num(places - 1, nan=0).astype(int)
    drawn = generator.hypergeometric(better, counts - 1 - better, SAMPLED)
    return np.where(np.isnan(places), np.inf, 1 + drawn)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--json", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)

    events = pd.read_csv(options.path, sep="\t")
    events.columns = ["user_id", "item_id", "weight", "timestamp"]
    events = events.sort_values(["user_id", "timestamp"], kind="stable", ignore_index=True)
    # Events with equal timestamps keep their order in the file.
    events["datetime"] = pd.to_datetime(np.arange(len(events)), unit="s")
    left = events.groupby("user_id").cumcount(ascending=False)
    train, seen = events[left >= 2], events[left >= 1]
    validation, test = events[left == 1], events[left == 0]

    def trainer():
        return Trainer(
            max_epochs=options.every,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    seed_everything(options.seed)
    model = SASRecModel(
        n_blocks=2,
        n_heads=2,
        n_factors=64,
        session_max_len=50,
        dropout_rate=0.2,
        lr=1e-3,
        batch_size=128,
        loss="softmax",
        epochs=options.every,
        get_trainer_func=trainer,
    )
    best = None
    for epoch in range(options.every, options.epochs + 1, options.every):
        data = dataset(train)
        if best is None:
            model.fit(data)
        else:
            model.fit_partial(data, min_epochs=options.every, max_epochs=options.every)
        chosen_by = figures(target_places(model, train, validation)[0])
        places, counts = target_places(model, seen, test)
        found = {
            "seed": options.seed,
            "epoch": epoch,
            "validation": chosen_by,
            "full": figures(places),
            "sampled": figures(sampled(places, counts, options.seed)),
        }
        print(json.dumps(found), flush=True)
        if best is None or chosen_by["ndcg_at_10"] > best["validation"]["ndcg_at_10"]:
            best = found
        elif epoch - best["epoch"] >= options.patience * options.every:
            break
    with open(options.json, "w", encoding="utf-8") as stream:
        json.dump(best, stream, indent=1)


if __name__ == "__main__":
    main()
