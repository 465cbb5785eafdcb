"""What runs report of caches."""
