"""Columns of every score file: the 0-based row of the table, and the probability."""

ROW, SCORE = "row", "score"
