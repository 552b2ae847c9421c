"""Faults while clients train and sample, and a checker of what they were promised: `python -m chaos`.

Clients (`client`) write what they ask and what they are answered (`history`); a `nemesis` disturbs the Fovea that they
use (`stack`, `links`) by a plan drawn from a seed (`faults`); the `checker` compares with what the same clients are
answered when nobody disturbs them, and the `inventory` with what they leave then.
"""
