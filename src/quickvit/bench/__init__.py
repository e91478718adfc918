"""Measurements: multiply-accumulates, parameters, speed and memory."""

from quickvit.bench.flops import Cost, Part, Variant, count, variants
from quickvit.bench.suite import BENCHMARKS, Record, Request, run
from quickvit.bench.table import Row

__all__ = [
    "BENCHMARKS",
    "Cost",
    "Part",
    "Record",
    "Request",
    "Row",
    "Variant",
    "count",
    "run",
    "variants",
]
