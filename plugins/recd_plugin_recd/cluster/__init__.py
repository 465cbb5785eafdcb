"""``recd cluster``: rows of a table sorted by session and time, out of core."""
