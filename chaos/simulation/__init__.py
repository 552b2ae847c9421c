"""The real gateway, on a machine that is made up: its clock, its chance, its network, its disk and the ends of its
processes follow from a seed, so that a run which breaks a promise can be had again.
"""
