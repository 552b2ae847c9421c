"""Digit scans as an environment."""

from examples.rl_digits import DigitEnvironment
from fovea_demo.digits import load_scans
from fovea_rollout.environments.environment import Answer


async def test_the_reward_is_one_for_the_digit_alone() -> None:
    scan = load_scans()[1][0]
    for text, reward in ((str(scan.digit), 1.0), (f" {scan.digit}\n", 1.0), (f"{scan.digit}0", 0.0), ("", 0.0)):
        environment = DigitEnvironment(scan)
        (message,) = await environment.reset()
        assert message.pictures[0].data == scan.png
        step = await environment.step(Answer(text))
        assert step.is_done
        assert step.reward == reward
