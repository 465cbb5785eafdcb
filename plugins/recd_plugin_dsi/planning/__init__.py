"""How many readers a trainer needs."""
