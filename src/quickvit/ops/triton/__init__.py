"""Triton kernels over packed channels, and the plain functions that launch them."""
