"""`python -m fovea_trainer --model DIR --port N`: starts all ranks.

The launcher runs the same command line once per rank. Environment variables tell each process its rank.
"""

import logging
import os
import sys

from fovea.runtime.processes import die_with_parent, importing
from fovea_trainer.ranks.rank_launcher import RankEnvironment, check_checkpoint, launch
from fovea_trainer.settings import TrainerSettings


def main() -> None:
    settings = TrainerSettings.from_command_line("trainer")
    rank_env = RankEnvironment.from_environ()
    if rank_env is None:
        try:
            check_checkpoint(settings.model)
        except (OSError, ValueError) as error:
            raise SystemExit(f"trainer: {error}") from None
        sys.exit(launch(settings))
    die_with_parent(rank_env.launcher)
    from fovea.runtime.processes import configure_logging

    configure_logging("trainer" if rank_env.rank == 0 else f"trainer{rank_env.rank}", settings.log_level)
    logging.getLogger("torch").setLevel("WARNING")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with importing("scipy", "sklearn"):  # a fifth of all imports, for features unused here
        from fovea_trainer.trainer_process import follower_process, leader_process

    leader_process(settings, rank_env) if rank_env.rank == 0 else follower_process(settings, rank_env)


if __name__ == "__main__":
    main()
