"""Forkpoint: long-lived agent sessions on hybrid KDA/MLA models, exact to the bit."""

__version__ = "0.1.0"
