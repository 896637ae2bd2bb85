"""OpenAI's Responses API in front of the same engine; nothing is stored."""
