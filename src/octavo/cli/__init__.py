"""Commands: the shell's way in, and the place where the environment and flags are read."""
