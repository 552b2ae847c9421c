"""The sampler: one vLLM engine behind `SamplerService`. It never processes images nor tokenizes prompts."""
