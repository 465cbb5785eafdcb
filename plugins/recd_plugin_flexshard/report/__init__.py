"""What runs report of tiers of rows."""
