"""From engine events to numbers that people and dashboards read."""
