"""Fovea: self-hosted post-training for vision-language models.

What every process shares: numpy and gRPC, never torch.
"""

__version__ = "0.1.0"
