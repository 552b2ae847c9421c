"""A standalone trainer listens only at the configured addresses."""

from tests.e2e.trainer.breaking.ground import Ground
from tests.listeners import listeners, unasked


async def test_a_trainer_listens_where_it_is_asked_to(ground: Ground) -> None:
    await ground.any_trainer()
    launcher, *ranks = ground.processes()
    assert not listeners([launcher])
    assert ground.running.address in listeners([launcher, *ranks])
    assert not unasked([launcher, *ranks], {ground.running.address, ground.metrics_address()})
