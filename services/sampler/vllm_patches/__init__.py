"""What is replaced in vLLM."""
