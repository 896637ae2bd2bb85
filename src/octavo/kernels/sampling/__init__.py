"""Choosing tokens: what every backend's sampler does, and the numpy one, the reference."""
