"""The main job, end to end: a vision-language model learns real images through the official Tinker SDK."""
