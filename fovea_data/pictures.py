"""Pictures of a dataset, read as rollouts read theirs."""

from fovea_rollout.pictures import read_picture

__all__ = ["read_picture"]
