"""`python -m services.trainer --model DIR --port N`: starts all ranks; under torchrun, runs one."""

import logging
import os
import sys

from services.trainer.launch import launch, under_torchrun
from services.trainer.settings import TrainerSettings


def main() -> None:
    settings = TrainerSettings.from_command_line("trainer")
    if not under_torchrun():
        sys.exit(launch(settings))
    from fovea.runtime import logs
    from services.trainer.rank import die_with_parent

    die_with_parent()
    rank = int(os.environ["RANK"])
    logs.configure("trainer" if rank == 0 else f"trainer{rank}", settings.log_level)
    logging.getLogger("torch").setLevel("WARNING")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from services.trainer.process import follower_process, leader_process

    leader_process(settings) if rank == 0 else follower_process(settings)


if __name__ == "__main__":
    main()
