"""Decoders written once against ``Ops``, and the files they are loaded from."""
