"""Measurements. Each prints one JSON line per figure, with the machine and the versions that it was measured on."""
