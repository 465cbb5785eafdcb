"""Prints the nearest items of some users, using the vectors from ``recd rank --vectors``.

python retrieve.py vectors
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the columns ``item``, ``[rows]``, and ``vector``, ``[rows, D]``, of a file."""
    table = pq.read_table(path)
    vectors = table["vector"].combine_chunks()
    return table["item"].to_numpy(), vectors.flatten().to_numpy().reshape(len(vectors), -1)


def main() -> None:
    folder = Path(sys.argv[1])
    items, vectors = read(folder / "items.parquet")
    clicked, users = read(folder / "users.parquet")
    # Faiss, hnswlib, LanceDB and pgvector can index these vectors by inner product.
    nearest = np.argsort(-(users @ vectors.T), axis=1)[:, :10]
    for user in range(min(3, len(users))):
        print(f"clicked {clicked[user]}, offered {', '.join(map(str, items[nearest[user]]))}")


if __name__ == "__main__":
    main()
