"""The built-in model, and sequence pooling for any model."""
