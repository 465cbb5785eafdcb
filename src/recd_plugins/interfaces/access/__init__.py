"""How often each row of a table is read: counted from data, or drawn from a distribution."""

from recd_plugins.interfaces.access.profile import AccessProfile
from recd_plugins.interfaces.access.table_access import TableAccess

__all__ = ["AccessProfile", "TableAccess"]
