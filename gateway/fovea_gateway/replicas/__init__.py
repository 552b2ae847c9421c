"""Which renderer, which sampler, and that the sampler holds the weights that a sample names."""
