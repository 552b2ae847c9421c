"""The real tinker-cookbook, unchanged, against Fovea: `python -m cookbook`."""
