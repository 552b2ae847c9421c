"""The process and its public APIs: Tinker's REST API, OpenAI's REST API and the gRPC API over the same use cases."""
