"""Which rank holds which part of which table, and what a step then takes.

- ``topologies``: the ranks, their memory and their rates (``topologies/*.yaml``).
- ``profile``, ``compute``, ``setting``: what is known of the data and the model.
- ``constraints``: sharding types, kernels and ranks that each table may have.
- ``step_cost``: the cost model of a step. ``estimates``: TorchRec's, with its gaps filled.
- ``search``, ``planner``: the plan that ``recd run`` and ``recd plan`` take.
- ``choosing``: ``prepare``, and the choosers of ``use: auto``.
- ``prepared``: a model prepared by a registry, as a trainer uses it.
- ``study``, ``report``, ``plan_mode``: ``recd plan``.
"""
