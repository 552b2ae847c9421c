"""The live page at `/`: what happens in this gateway, for whoever looks, without work for those who do not."""
