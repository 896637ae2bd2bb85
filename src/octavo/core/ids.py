"""Identifiers that cross borders in place of objects."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""Names a request for its client; unique among the requests of one engine."""

SequenceId = NewType("SequenceId", int)
"""Names one branch of a request; never reused within an engine's life."""

BlockId = NewType("BlockId", int)
"""Index of a KV block, 0 to ``num_blocks - 1`` (other engines call a block a page)."""

TokenId = int
"""Index of a token in the model's vocabulary."""
