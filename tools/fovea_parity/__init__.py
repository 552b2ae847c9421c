"""Checks a checkpoint on a CPU: renderer, trainer and sampler against the checkpoint's own code in transformers.

`fovea models check DIR` runs `python -m fovea_parity DIR`. `make models` checks all tiny families and writes the
results to docs/reference/models.md.
"""
