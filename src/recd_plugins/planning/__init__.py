"""Which rank holds which part of which table, and what a step then takes.

Making a plan:

- ``topologies``: the ranks, their memory and their bandwidths (``topologies/*.yaml``).
- ``profile``: lengths and dedupe factors of a model's data.
- ``constraints``, ``feasible``: what plugins and data tell TorchRec's planner of each table.
- ``performance``, ``storage``, ``proposers``: TorchRec's estimates and search, put right.
- ``planner``: all of these together, the one planner of ``recd run`` and ``recd plan``.

What users call:

- ``prepared``: a registry that prepares a model, and what it has prepared. ``prepare``: how.

What a plan comes to:

- ``compute``, ``activations``: operations and memory of the model apart from its tables, counted.
- ``work``, ``collectives``: what a step of each rank does. ``stage_times``: the seconds of it.
  ``recd_plugins.training.calibrate`` measures them on this machine.

``recd plan``:

- ``plan_mode``: what a flag plans in place of the tables.
- ``candidates``, ``largest_batch``, ``study``: a model with the plugins and without, planned.
- ``plan_report``, ``report_text``, ``report_plot``: what comes out.
"""
