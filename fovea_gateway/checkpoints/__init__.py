"""Checkpoints: kept under names, listed, published, copied, exported, removed."""
