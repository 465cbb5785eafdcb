"""Sharding plans and predicted step times.

- ``topologies``: ranks, memory and bandwidths (``topologies/*.yaml``).
- ``profile``, ``compute``, ``context``: measurements of data and model.
- ``constraints``, ``search``, ``planner``: the plan of ``recd run`` and ``recd plan``.
- ``step_cost``, ``estimates``: cost model of a step; TorchRec's estimates.
- ``choosing``, ``prepared``: ``prepare``, choosers, and prepared models.
- ``study``, ``report``, ``plan_mode``: ``recd plan``.
"""
