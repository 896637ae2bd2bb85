"""Named tensor operations and the backends that carry them out."""
