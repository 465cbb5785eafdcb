"""What parts hand one another: rows, batches, tables, and what is known of data and of a step.

Values that interfaces name; what measures, makes or shows them is in the folders above.
"""
