"""What `recd bench` runs."""
