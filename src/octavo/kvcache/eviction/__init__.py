"""Which cached block is forgotten first: policies, hints, and what keeps them in step."""
