"""Checkpoints: their registry, their storage, exports and uploads."""
