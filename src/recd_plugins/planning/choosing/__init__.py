"""What a chooser is asked, and what becomes of its answer.

- ``question``: a model prepared and planned with some offers, without touching it; its step.
- ``data``: what they are told of the data. ``entries``: a registry with entries in its place.
- ``choose``: the registry with what came out, the same on all ranks.
"""
