"""Columns of every score file."""

#: The 0-based row of the table, and the probability.
ROW, SCORE = "row", "score"
