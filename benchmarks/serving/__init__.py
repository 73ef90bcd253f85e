"""A model folder on one device: loading, prefill and decode, each beside what bounds it."""
