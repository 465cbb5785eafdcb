"""``recd analyze``: how much of a table is repetition, and what to do (RecD, section 3)."""
