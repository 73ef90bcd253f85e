"""Behaviour around a blob store, over the same port: retry, limits, metering, faults."""
