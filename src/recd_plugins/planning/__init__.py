"""Which rank holds which part of which table."""

from recd_plugins.planning.constraints import table_constraints
from recd_plugins.planning.planner import build_planner, default_topology
from recd_plugins.planning.tables import rows_by_feature, tables_of

__all__ = ["build_planner", "default_topology", "rows_by_feature", "table_constraints", "tables_of"]
