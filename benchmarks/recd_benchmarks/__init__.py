"""Benchmarks of the framework's own parts, and of parts of two plugins together.

``dlrm`` is of the demo's trainer and ``ingest`` of reading; ``hot_batches`` trains on what
``recd_plugin_recd`` measures accuracy with, in the orders of ``recd_plugin_scars``.
"""

#: Modules that ``recd bench`` runs besides those of plugins.
BENCHMARKS = ["recd_benchmarks.dlrm", "recd_benchmarks.hot_batches", "recd_benchmarks.ingest"]
