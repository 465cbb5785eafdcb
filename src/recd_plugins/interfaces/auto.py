"""``auto``: the word of ``sharding:`` that needs no package, as it stands for all of them."""

from __future__ import annotations

from recd_plugins.interfaces.sharding import Sharding


class Auto(Sharding):
    """Of what installed plugins offer, by tables, what takes the shortest predicted step.

    It takes the tables that no other entry names. ``Registry.prepare`` puts the entries that it
    chooses in its place, so that nothing after it meets it; what is not prepared sees tables that
    are left to the planner.
    """

    name = "auto"
