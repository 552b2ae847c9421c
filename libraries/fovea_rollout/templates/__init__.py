"""Chat templates, which render conversations as prompts."""
