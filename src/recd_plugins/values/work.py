"""What one training step does on a rank."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Work:
    """One step of one rank, forward and backward.

    Attributes:
        steps: 1, for what a step costs however little it does.
        ids_looked_up: ids that its lookups take; an id counts once for each column shard.
        bytes_looked_up: of the embeddings that these ids read.
        rows_updated: rows of its tables that these ids are of, each once.
        rows_updated_by_fbgemm: of them, those whose row-wise Adagrad on a CPU is FBGEMM's own, as
            with TorchRec's sharders.
        sequence_rows_updated_by_fbgemm: of these, those of sequences, which FBGEMM's kernels do not
            pool.
        lookups: calls of kernels, one for those of its tables of a module that are sharded alike.
        tables_looked_up: tables that it has shards of.
        rows_looked_up: rows of deduplicated batches whose ids its pooling lookups take.
        bytes_from_host: of cached tables, moved from the backing store in host memory and back.
        bytes_from_file: the same of backing stores in files.
        collectives: of the embeddings' input dist and output dist.
        bytes_in_node: that it sends to ranks of its node in them, and receives likewise.
        bytes_across_nodes: that it sends to ranks of other nodes.
        bytes_waited_for: that a link carries beside what ranks send to other nodes in the mean,
            since it has more embeddings to send, and all their gradients come back to it.
        bytes_reduced: gradients that it sends to sum them up; where links carry those of several
            groups at once, all that they carry.
        products: matrix products, however small.
        matmul_flops: operations of them.
        matmul_bytes: of their factors and results, which cost more than operations where one side
            is short.
        attention_flops: operations of torch's fused attention.
        attention_queries: positions of its heads, each of which has scores to sum up.
        element_bytes: read and written by all else that computes.
        operators: of torch beside products that run one after the other, however little each does.
        ids_read: ids of the batch, which the loader converts.
        ids_made_unique: of them, those that coalescing looks at before it sends each once.
    """

    steps: float = 1.0
    ids_looked_up: float = 0.0
    bytes_looked_up: float = 0.0
    rows_updated: float = 0.0
    rows_updated_by_fbgemm: float = 0.0
    sequence_rows_updated_by_fbgemm: float = 0.0
    lookups: float = 0.0
    tables_looked_up: float = 0.0
    rows_looked_up: float = 0.0
    bytes_from_host: float = 0.0
    bytes_from_file: float = 0.0
    collectives: float = 0.0
    bytes_in_node: float = 0.0
    bytes_across_nodes: float = 0.0
    bytes_waited_for: float = 0.0
    bytes_reduced: float = 0.0
    products: float = 0.0
    matmul_flops: float = 0.0
    matmul_bytes: float = 0.0
    attention_flops: float = 0.0
    attention_queries: float = 0.0
    element_bytes: float = 0.0
    operators: float = 0.0
    ids_read: float = 0.0
    ids_made_unique: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Both in one step."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Work(**{**sums, "steps": 1.0})

    def __mul__(self, share: float) -> Work:
        """Part of it, in one step."""
        parts = {f.name: getattr(self, f.name) * share for f in fields(self)}
        return Work(**{**parts, "steps": 1.0})
