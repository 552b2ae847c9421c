"""The renderer service: images become placeholder tokens and vision tensors, once per image; the rest is splicing.

The service process itself loads neither torch nor transformers: only its image workers do (`worker`).
"""
