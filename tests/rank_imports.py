"""What ranks of tests have imported when they begin, without what the trainer's own ranks do without."""

from fovea.runtime.processes import UNUSED, importing

with importing(*UNUSED):
    import fovea_trainer.trainer_process  # noqa: F401
