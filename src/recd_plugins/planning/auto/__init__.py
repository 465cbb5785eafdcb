"""What ``use: auto`` stands for: chosen among what sharding plugins offer, by predicted steps.

- ``groups``: tables that are alike, which get one choice together, and the offers for them.
- ``trials``: a model prepared and planned with some choices, without touching it; its step.
- ``search``: choices, better and better. ``choose``: the registry with what came out.
- ``chosen``: the report of it; ``lines``: the lines of a registry file that say the same.
"""
