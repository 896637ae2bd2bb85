"""The OpenAI-compatible HTTP server around an engine."""
