"""How likely tokens are, in arithmetic that every backend and machine repeats bit for bit.

A weight is ``exp((logit - top) / temperature)``, at most 1, computed in float32 by operations that
IEEE 754 rounds alike everywhere. Its mass is the weight as a whole number of units of 2^-44, so
sums of masses are exact: neither their order nor the width of a vector can move a token. What is
below half a unit cannot be drawn, together less than 1e-8 of a row of 200,000 tokens.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvariantError

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

LOG2_E: Final = 1.4426950408889634
MASS_BITS: Final = 44
MAX_VOCAB: Final = 2**18 + 2**17
"""Most tokens whose masses an int64 can add; the largest vocabularies of 2025 have 262,144."""

_CHUNK: Final = 8192
"""Tokens worked on at once, so that intermediate values stay in the first level of cache."""
_LEAST_POWER: Final = np.float32(-100.0)
"""Weights stay normal numbers; their masses are 0 long before."""
_EXP2: Final = tuple(
    np.float32(coefficient)
    for coefficient in (
        0.00015353361959569156,
        0.0013398873852565885,
        0.00961843691766262,
        0.055503323674201965,
        0.24022647738456726,
        0.6931471824645996,
        1.0,
    )
)
"""Minimax polynomial of 2^x on [-0.5, 0.5], relative error 2e-9, highest power first."""


def check_vocab(vocab_size: int) -> None:
    """Raise ``InvariantError`` if masses of so many tokens could overflow."""
    if not 0 < vocab_size <= MAX_VOCAB:
        raise InvariantError(f"A vocabulary has 1 to {MAX_VOCAB} tokens, not {vocab_size}.")


def token_weights(logits: Float32, top: np.float32, temperature: float = 1.0) -> Float32:
    """Return the weights of ``logits [V]``, none above ``top``, minus infinity allowed."""
    factor = np.float32(LOG2_E / temperature)
    weights = np.empty(len(logits), dtype=np.float32)
    with np.errstate(over="ignore"):
        for first in range(0, len(logits), _CHUNK):
            chunk = slice(first, first + _CHUNK)
            _exp2((logits[chunk] - top) * factor, weights[chunk])
    return weights


def _exp2(power: Float32, out: Float32) -> None:
    """Write 2 to the ``power`` to ``out``; ``power`` is spoilt."""
    np.maximum(power, _LEAST_POWER, out=power)
    turns = np.rint(power)
    power -= turns
    np.multiply(power, _EXP2[0], out=out)
    for coefficient in _EXP2[1:-1]:
        out += coefficient
        out *= power
    out += _EXP2[-1]
    exponents = turns.astype(np.int32)
    exponents <<= 23
    bits = out.view(np.int32)
    bits += exponents


def token_masses(weights: Float32) -> Int64:
    """Return weights ``[V]`` as whole numbers of 2^-44."""
    masses = np.empty(len(weights), dtype=np.int64)
    for first in range(0, len(weights), _CHUNK):
        chunk = slice(first, first + _CHUNK)
        scaled = np.multiply(weights[chunk], 2.0**MASS_BITS, dtype=np.float64)
        masses[chunk] = np.rint(scaled, out=scaled)
    return masses


def log_total(top: float, total: int) -> float:
    """Return ``log(sum(exp(logits)))`` of a row with the largest logit ``top``."""
    return top + math.log(math.ldexp(total, -MASS_BITS))
