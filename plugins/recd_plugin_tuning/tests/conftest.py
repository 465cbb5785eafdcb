from tests.small_registry import make_registry, table

__all__ = ["make_registry", "table"]
