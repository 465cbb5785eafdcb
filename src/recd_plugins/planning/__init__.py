"""Sharding plans and predicted step times.

- ``topologies``: ranks, memory and bandwidths (``topologies/*.yaml``).
- ``profile``, ``compute``, ``plan_context``: measurements of data and model.
- ``constraints``, ``search``, ``planner``: the planner of ``recd run`` and ``recd plan``.
- ``step_cost``, ``estimates``: cost model of a step, and TorchRec's estimates.
- ``choosing``, ``prepared``: ``prepare``, the search of ``use: auto``, and prepared models.
- ``study``, ``report``, ``plan_mode``: the command ``recd plan``.
"""
