"""Benchmarks of the framework itself, and of plugins of several packages together."""

_NAMES = (
    *("accuracy", "cluster", "convert", "dlrm", "fill", "flexshard", "hot_batches", "ingest"),
    *("jagged", "logs", "preprocess", "reader", "readers", "scars", "storage", "traces", "train"),
    *("trainer", "wire"),
)
#: Modules that ``recd bench`` runs besides those of plugins.
BENCHMARKS = [f"recd_benchmarks.{name}" for name in _NAMES]
