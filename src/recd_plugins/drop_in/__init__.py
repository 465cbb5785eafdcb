"""What a trainer of TorchRec's takes without a registry file of data."""
