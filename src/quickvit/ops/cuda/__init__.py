"""Kernels in CUDA, for what Triton cannot say."""
