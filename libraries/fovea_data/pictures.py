"""Reads the pictures of a dataset, as rollouts do."""

from fovea_rollout.pictures import read_picture

__all__ = ["read_picture"]
