"""The services behind the gateway. Selects a renderer or sampler for each request, and loads weights into samplers."""
