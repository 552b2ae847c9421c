"""gRPC clients in other languages, each made from the protos by its own tool chain."""
