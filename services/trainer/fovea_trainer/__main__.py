"""`python -m fovea_trainer --model DIR --port N`: starts all ranks of this node, and ends with them."""

import os
from importlib.metadata import version

from fovea.runtime.processes import UNUSED, importing, leave
from fovea_trainer.ranks.rank_launcher import Rank, check_checkpoint, check_transformers, launch
from fovea_trainer.settings import TrainerSettings


def main() -> None:
    """Reads the settings, checks the checkpoint and runs the ranks."""
    settings = TrainerSettings.from_command_line("trainer")
    # numpy starts its threads when it is imported. With one thread per rank, there are none here before the forks.
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    try:
        check_transformers(version("transformers"))
        check_checkpoint(settings.model)
    except (OSError, ValueError) as error:
        raise SystemExit(f"trainer: {error}") from None
    leave(launch(settings, _import_rank))


def _import_rank() -> Rank:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with importing(*UNUSED):
        from fovea_trainer.trainer_process import rank_process
    return rank_process


if __name__ == "__main__":
    main()
