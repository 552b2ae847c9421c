"""Runs the real, unchanged tinker-cookbook against Fovea: `python -m cookbook`."""
