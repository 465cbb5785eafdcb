"""What is in a checkpoint: its files, what they say and whether they are whole. Without torch."""
