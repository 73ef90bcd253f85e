"""The scheduler: what runs in the next step. Pure Python, no clocks, no I/O."""
