"""A plain PyTorch reader that converts Parquet files to TorchRec batches."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class Impressions(IterableDataset[Batch]):
    """Yields the TorchRec batches of one rank, read from a contiguous segment of the rows.

    Drops the last rows if they do not fill a batch on every rank.

    Args:
        path: folder of Parquet files.
        sparse: names of columns with lists of ids.
        dense: names of columns with one number per row.
        num_embeddings: rows of each embedding table. Ids are taken modulo this number.
        batch_size: rows per batch on one rank.
        rank: rank of this process.
        world_size: number of ranks.
    """

    def __init__(
        self,
        path: str,
        sparse: list[str],
        dense: list[str],
        num_embeddings: int,
        batch_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.path = path
        self.sparse = sparse
        self.dense = dense
        self.num_embeddings = num_embeddings
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[Batch]:
        table = pq.read_table(self.path, columns=[*self.sparse, *self.dense, "label"])
        steps = len(table) // (self.batch_size * self.world_size)
        first = self.rank * steps * self.batch_size
        for start in range(first, first + steps * self.batch_size, self.batch_size):
            yield self._batch(table.slice(start, self.batch_size).combine_chunks())

    def _batch(self, rows: pa.Table) -> Batch:
        lists = [rows.column(name).combine_chunks() for name in self.sparse]
        values = torch.cat([_tensor(ids.flatten()) for ids in lists])
        return Batch(
            dense_features=torch.stack([_tensor(rows.column(name)) for name in self.dense], dim=1),
            sparse_features=KeyedJaggedTensor(
                keys=self.sparse,
                values=values.remainder(self.num_embeddings),
                lengths=torch.cat([_tensor(ids.value_lengths()) for ids in lists]),
            ),
            labels=_tensor(rows.column("label")).float(),
        )


def build_loader(
    path: str,
    sparse: list[str],
    dense: list[str],
    num_embeddings: int,
    batch_size: int,
    device: torch.device,
) -> DataLoader[Batch]:
    """Return a loader of this rank's batches, in pinned memory if ``device`` is a GPU."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = Impressions(path, sparse, dense, num_embeddings, batch_size, rank, world_size)
    return DataLoader(rows, batch_size=None, pin_memory=device.type == "cuda")


def _tensor(column: pa.Array | pa.ChunkedArray) -> Tensor:
    return torch.tensor(column.to_numpy())
