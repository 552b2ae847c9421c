"""The sampler: one vLLM engine behind `SamplerService`. It neither processes images nor tokenizes prompts."""
