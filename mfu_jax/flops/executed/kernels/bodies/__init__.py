"""Kernels whose body is in the program as MLIR: it is read and walked over its grid."""
