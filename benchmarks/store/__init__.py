"""The state store: commits, checkpoints, forks, garbage collection."""
