"""`fovea doctor`: collects what support needs, without secrets, and names what is wrong and how to fix it."""
