"""Measurements that no recipe makes. They run in the client environments, so they do not import Fovea."""
