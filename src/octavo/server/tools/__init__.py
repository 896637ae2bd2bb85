"""Tool calls and reasoning: how models write them, and how the server reads them back."""
