"""Copies of a session's state on its device: pools to one buffer and back, slot to slot, and byte planes."""
