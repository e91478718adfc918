"""Seeds: the one place where randomness of data and training comes from."""

from __future__ import annotations

from hashlib import blake2b


def derived_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a function of its parts alone: of (seed, epoch, sample, view), for example.

    The same on every machine and in every version; parts that differ anywhere give unrelated seeds.
    """
    key = repr(tuple(part if isinstance(part, str) else int(part) for part in parts))
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
