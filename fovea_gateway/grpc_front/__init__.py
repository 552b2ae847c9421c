"""The gRPC API: decode, one call, encode."""
