"""The renderer service: converts images into placeholder tokens and vision tensors, and splices them into prompts.

Each image is processed once. The service process itself loads neither torch nor transformers; only its image workers do
(`image_worker`).
"""
