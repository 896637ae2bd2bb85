"""Anthropic's Messages API in front of the same engine, for agents that speak it."""
