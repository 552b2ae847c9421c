"""The real gateway on a simulated machine.

A seed determines its clock, randomness, network, disk and process crashes, so a run that breaks a promise can be
repeated.
"""
