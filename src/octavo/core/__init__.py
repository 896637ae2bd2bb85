"""Plain data that every package speaks: requests, plans, settings, errors and events."""
