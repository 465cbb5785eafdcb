"""The built-in DLRM model, and sequence pooling for any model."""
