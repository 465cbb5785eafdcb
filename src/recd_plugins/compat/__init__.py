"""Fixes for problems of TorchRec and FBGEMM, one module per problem."""
