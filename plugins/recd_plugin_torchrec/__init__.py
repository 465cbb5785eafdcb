"""TorchRec's own sharding kinds and FBGEMM's cache, by name."""
