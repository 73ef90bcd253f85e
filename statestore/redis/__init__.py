"""The shared catalog and blobs: Redis or Valkey, alone, behind Sentinel, or a cluster."""
