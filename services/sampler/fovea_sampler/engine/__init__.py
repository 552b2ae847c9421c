"""The code that drives vLLM. Some modules run in the service's process, the others in the engine's workers."""
