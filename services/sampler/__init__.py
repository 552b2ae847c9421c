"""The sampler: one vLLM engine behind `fovea.api.v1.SamplerService`. It never processes images nor tokenizes prompts."""
