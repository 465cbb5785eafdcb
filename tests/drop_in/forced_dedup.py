"""Deduplication of test batches, which are too small for it to pay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from recd_plugins.drop_in import dedup


@contextmanager
def forced_dedup() -> Iterator[None]:
    """Have ``dedup`` decide as if lookups cost more than anything else; also a decorator."""
    pays = dedup._pays
    dedup._pays = lambda whole, ranks: True
    try:
        yield
    finally:
        dedup._pays = pays
