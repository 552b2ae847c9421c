"""The public side of Fovea: Tinker's REST API, OpenAI's REST API and a gRPC API over the same use cases.

The gateway manages sessions, futures, the order of requests, authentication, routing and the checkpoint registry. It
never loads torch, vllm or transformers: tensors stay bytes until the service that computes on them.
"""
