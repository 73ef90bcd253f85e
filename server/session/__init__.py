"""Sessions: the loop, ownership, forks, pause and resume, streams. No torch, no grpc."""
