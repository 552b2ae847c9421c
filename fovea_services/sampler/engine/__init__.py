"""All that touches vLLM. `launch` and `engine` run in the service's process, the rest in the engine's workers."""
