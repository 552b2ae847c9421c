"""The demo on a really pretrained language model: a fine-tune, reinforcement learning, and a merged checkpoint."""
