"""A demo of the main use, end to end: teaches a vision-language model real images through the official Tinker SDK."""
