"""The `fovea` command."""
