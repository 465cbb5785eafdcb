"""How often rows of tables are read: measured, counted, or drawn from a distribution.

For shardings and caches that place rows by it, and for their plans. Needs no torch.
"""

from recd_plugins.access import AccessProfile, TableAccess
from recd_plugins.access.counting import TableCounter
from recd_plugins.access.counts import add_counts, keep_most_read
from recd_plugins.access.distributions import exponential, from_weights, half_normal, zipf
from recd_plugins.access.reuse import ReuseHistogram, from_reuse_histogram, read_reuse_histograms
from recd_plugins.data.measure_access import AccessOptions, measure_access
from recd_plugins.data.rows import training_rows

__all__ = [
    "AccessOptions",
    "AccessProfile",
    "ReuseHistogram",
    "TableAccess",
    "TableCounter",
    "add_counts",
    "exponential",
    "from_reuse_histogram",
    "from_weights",
    "half_normal",
    "keep_most_read",
    "measure_access",
    "read_reuse_histograms",
    "training_rows",
    "zipf",
]
