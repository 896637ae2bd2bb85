"""What-if: the serving code itself, driven by traces in place of clients and models."""
