"""OpenAI's API on top of the same sampling as Tinker's: models, chat completions, completions."""
