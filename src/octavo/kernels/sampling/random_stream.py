"""The random stream of a sequence: draw k is a pure function of its seed and k.

A counter instead of a state: preemption, chunking and batch-mates cannot advance the stream, so
output token k of a request is chosen with the same number whatever happened around it.
"""

from typing import Final

_MASK: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_RESOLUTION: Final = 2.0**-53


def uniform(seed: int, draw: int) -> float:
    """Return draw ``draw`` (from 0) of the stream of ``seed``: a float64 in [0, 1).

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) started at a mixed seed, so that neighbouring
    seeds do not share shifted streams. Seeds are taken modulo 2^64.
    """
    return (_mix(_mix(seed & _MASK) + (draw + 1) * _GOLDEN & _MASK) >> 11) * _RESOLUTION


def _mix(value: int) -> int:
    """Return SplitMix64's finalizer of a 64-bit number: a bijection that scatters its bits."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
