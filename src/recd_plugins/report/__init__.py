"""What was written of runs, as a page: one run, or several side by side."""
