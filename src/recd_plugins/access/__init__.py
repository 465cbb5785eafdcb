"""How often each row of a table is read: counted from data, or drawn from a distribution."""

from recd_plugins.access.profile import AccessProfile
from recd_plugins.access.table_access import TableAccess

__all__ = ["AccessProfile", "TableAccess"]
