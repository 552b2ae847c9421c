"""gRPC clients in other languages, each generated from the protos by its own toolchain."""
