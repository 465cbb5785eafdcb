"""Layout and options of a dynamic table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recd_plugin_dynamic.index.bucket_index import IdIndex


@dataclass(frozen=True)
class DynamicTable:
    """Layout of a table that maps ids to rows.

    Ids are spread over buckets of ``rows_per_bucket + 1`` table rows. The first row of each bucket
    is a default row, which is zero and stays zero.

    Attributes:
        num_buckets: number of buckets; a multiple of the number of ranks.
        rows_per_bucket: number of ids that fit into a bucket.
        policy: eviction policy.
        min_count: number of batches with an id before the id gets a row.
    """

    num_buckets: int
    rows_per_bucket: int
    policy: Any
    min_count: int = 1

    def index(self, first_bucket: int, last_bucket: int) -> IdIndex:
        """Return an empty index of the buckets ``first_bucket`` to ``last_bucket - 1``."""
        from recd_plugin_dynamic.index.bucket_index import IdIndex

        return IdIndex(
            first_bucket, last_bucket, self.num_buckets, self.rows_per_bucket, self.policy
        )

    @property
    def ids_per_bucket(self) -> int:
        """Width of a bucket in the 63-bit space of mixed ids."""
        from recd_plugin_dynamic.index.mix import bucket_width

        return bucket_width(self.num_buckets)
