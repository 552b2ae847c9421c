"""Does a checkpoint work here? Renderer, trainer and sampler against the checkpoint's own code in transformers, on CPU.

`fovea models check DIR` is `python -m parity DIR`; `make models` runs every tiny family and writes docs/models.md.
"""
