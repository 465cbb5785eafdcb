"""What limited processes do; imports little, so that they begin soon."""

from __future__ import annotations

from recd_plugin_scars.benchmarks.memory_limit import MemoryLimit


def allocate(num_bytes: int, limit: MemoryLimit) -> int:
    """Use so much memory under the limit."""
    limit.set()
    return len(bytearray(num_bytes))
