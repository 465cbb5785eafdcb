"""What a cluster can do, measured on all of its ranks."""
