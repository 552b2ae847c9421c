"""`python -m services.trainer --model DIR --port N`: starts all ranks; as one that was started so, is a rank."""

import logging
import os
import sys

from services.trainer.model_types import check_checkpoint
from services.trainer.ranks.place import Place
from services.trainer.ranks.rank_launcher import launch
from services.trainer.settings import TrainerSettings


def main() -> None:
    settings = TrainerSettings.from_command_line("trainer")
    place = Place.find()
    if place is None:
        try:
            check_checkpoint(settings.model)
        except (OSError, ValueError) as error:
            raise SystemExit(f"trainer: {error}") from None
        sys.exit(launch(settings))
    place.die_with_launcher()
    from fovea.runtime import logs

    logs.configure("trainer" if place.rank == 0 else f"trainer{place.rank}", settings.log_level)
    logging.getLogger("torch").setLevel("WARNING")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from services.trainer.trainer_process import follower_process, leader_process

    leader_process(settings, place) if place.rank == 0 else follower_process(settings, place)


if __name__ == "__main__":
    main()
