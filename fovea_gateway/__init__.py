"""The only public face of Fovea: Tinker's REST API and a gRPC API over the same use cases.

Holds sessions, futures, request order, identity, routing and the checkpoint registry. Never loads torch, vllm or
transformers: tensors stay bytes until the service that computes on them.
"""
