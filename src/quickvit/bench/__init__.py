"""Measurements: multiply-accumulates, parameters, speed and memory."""

from quickvit.bench.flops import Cost, Part, Variant, count, variants

__all__ = ["Cost", "Part", "Variant", "count", "variants"]
