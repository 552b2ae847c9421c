"""Imports the modules of test ranks, without those that the trainer's own ranks do not need."""

from fovea.runtime.processes import UNUSED, importing

with importing(*UNUSED):
    import fovea_trainer.trainer_process  # noqa: F401
