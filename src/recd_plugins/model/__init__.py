"""The built-in model, and poolings of sequences for models of any make."""
