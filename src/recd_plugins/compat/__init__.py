"""Fixes and internals of TorchRec and FBGEMM, one file per upstream problem."""
