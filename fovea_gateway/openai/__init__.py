"""OpenAI's API over the same sampling as Tinker's: models, chat completions, completions."""
