"""What no recipe measures; these run in the client environments, so they import nothing of Fovea."""
