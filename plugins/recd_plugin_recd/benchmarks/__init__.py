"""What ``recd bench`` runs of the package."""
