"""Compiled CPU kernels: LLVM IR and numba, kept on disk once compiled."""
