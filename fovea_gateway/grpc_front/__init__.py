"""The gRPC API. Each method decodes a request, makes one call and encodes the answer."""
