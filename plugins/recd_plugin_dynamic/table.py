"""Layout and options of a dynamic table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recd_plugin_dynamic.index.bucket_index import IdIndex
    from recd_plugin_dynamic.index.policies import EvictionPolicy


@dataclass(frozen=True)
class DynamicTable:
    """Layout of a table that maps ids to rows.

    Ids are spread over buckets of equally many rows. The first row of each bucket gets no id. Ids
    without a row use row 0 of a rank's shard, whose weights are set to zero before each lookup.

    Attributes:
        num_buckets: number of buckets; a multiple of the number of ranks.
        rows_per_bucket: rows of each bucket, including its first row.
        policy: eviction policy.
        min_count: an id gets a row in the ``min_count``-th batch that contains it.
    """

    num_buckets: int
    rows_per_bucket: int
    policy: EvictionPolicy
    min_count: int = 1

    @property
    def capacity(self) -> int:
        """Number of ids that fit into the table."""
        return self.num_buckets * (self.rows_per_bucket - 1)

    def index(self, first_bucket: int, last_bucket: int) -> IdIndex:
        """Return an empty index of the buckets ``first_bucket`` to ``last_bucket - 1``."""
        from recd_plugin_dynamic.index.bucket_index import IdIndex

        return IdIndex(
            first_bucket,
            last_bucket,
            self.num_buckets,
            self.rows_per_bucket,
            self.policy,
            min_count=self.min_count,
            reserved_rows=1,
        )
