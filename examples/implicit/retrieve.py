"""The items nearest to users, by the vectors that recd rank --vectors wrote.

python retrieve.py vectors
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Items and vectors ``[rows, D]``."""
    table = pq.read_table(path)
    vectors = table["vector"].combine_chunks()
    return table["item"].to_numpy(), vectors.flatten().to_numpy().reshape(len(vectors), -1)


def main() -> None:
    folder = Path(sys.argv[1])
    items, vectors = read(folder / "items.parquet")
    clicked, users = read(folder / "users.parquet")
    # Any index for inner products takes these two tables: Faiss, hnswlib, LanceDB, pgvector.
    nearest = np.argsort(-(users @ vectors.T), axis=1)[:, :10]
    for user in range(min(3, len(users))):
        print(f"clicked {clicked[user]}, offered {', '.join(map(str, items[nearest[user]]))}")


if __name__ == "__main__":
    main()
