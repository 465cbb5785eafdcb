"""Parts of ``recd bench readers``."""
