"""What ``recd bench drop_in`` is made of: trainers, their three lines, and loaders."""
