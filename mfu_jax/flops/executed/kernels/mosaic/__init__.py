"""Pallas kernels for TPUs: the kernel's body is in the program, and is walked over its grid."""
