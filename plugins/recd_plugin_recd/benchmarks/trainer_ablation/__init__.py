"""What ``recd bench trainer`` is made of: variants of one model, stepped in turns on all ranks."""
