"""Where the two towers meet: steps, the engine thread, and the front ends that callers hold."""
