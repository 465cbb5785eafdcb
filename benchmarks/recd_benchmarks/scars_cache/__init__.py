"""The parts of ``recd bench scars``."""
