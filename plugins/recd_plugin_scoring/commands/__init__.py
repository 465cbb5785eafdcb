"""What the package adds to the command ``recd``."""
