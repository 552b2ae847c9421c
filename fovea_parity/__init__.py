"""Does a checkpoint work here? Renderer, trainer and sampler against the checkpoint's own code in transformers, on CPU.

`fovea models check DIR` is `python -m fovea_parity DIR`; `make models` runs all tiny families for
docs/reference/models.md.
"""
