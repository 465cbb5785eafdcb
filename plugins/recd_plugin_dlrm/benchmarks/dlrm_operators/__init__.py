"""What ``recd bench dlrm`` is made of: the DLRM paper's configuration, trained by two programs."""
