"""Catalog and blobs that live and die with the process."""
