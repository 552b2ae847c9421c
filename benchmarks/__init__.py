"""Measurements. Each prints one JSON line a figure, with the machine and the versions that it was measured on."""
