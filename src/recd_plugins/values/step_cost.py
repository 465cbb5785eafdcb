"""The work of one training step on a rank, which rates turn into seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class StepCost:
    """One step of one rank, forward and backward.

    Attributes:
        steps: 1, for the fixed cost of a step.
        ids_looked_up: ids of its lookups; an id counts once for each column shard.
        bytes_looked_up: embeddings that these ids read.
        rows_updated: distinct rows of its tables that learn.
        lookups: kernel calls: one for the tables of a module that are sharded alike.
        bytes_from_host: of cached tables, moved from host memory and back.
        bytes_from_file: the same from files.
        collectives: of the input dist and output dist.
        bytes_in_node: sent to ranks of its node in them.
        bytes_across_nodes: sent to ranks of other nodes.
        bytes_reduced: gradients that it sends to sum them up.
        matmul_flops: operations of matrix products.
        attention_flops: operations of torch's fused attention.
        element_bytes: read and written by all other operators.
        operators: torch operators beside matrix products.
        ids_made_unique: ids that coalescing looks at.
    """

    steps: float = 1.0
    ids_looked_up: float = 0.0
    bytes_looked_up: float = 0.0
    rows_updated: float = 0.0
    lookups: float = 0.0
    bytes_from_host: float = 0.0
    bytes_from_file: float = 0.0
    collectives: float = 0.0
    bytes_in_node: float = 0.0
    bytes_across_nodes: float = 0.0
    bytes_reduced: float = 0.0
    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    element_bytes: float = 0.0
    operators: float = 0.0
    ids_made_unique: float = 0.0

    def __add__(self, other: StepCost) -> StepCost:
        """Return both in one step."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return StepCost(**{**sums, "steps": 1.0})

    def __mul__(self, share: float) -> StepCost:
        """Return a part of it, in one step."""
        parts = {f.name: getattr(self, f.name) * share for f in fields(self)}
        return StepCost(**{**parts, "steps": 1.0})
