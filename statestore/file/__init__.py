"""Blobs as files."""
