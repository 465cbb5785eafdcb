"""Names of the columns that every score file of ``recd predict`` has."""

#: The 0-based row of the table, and the probability.
ROW, SCORE = "row", "score"
