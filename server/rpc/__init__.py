"""gRPC: services, conversion, status mapping, interceptors."""
