"""Parity distinguishes an arbitrary choice between nearly equal experts from a wrong one."""

import numpy as np
import pytest
import torch

from fovea_parity.documents import DocumentMaker, picture
from fovea_parity.prompts import Prompt
from fovea_parity.router_border import MOST_GAP, SameExperts, least_gap, router_scores
from tests.families import ensure_family

LAYERS, TOP = 6, 2


@pytest.mark.parametrize(("chosen", "gap"), [([0, 1], 0.25), ([1, 0], 0.25), ([0, 2], -0.25), ([2, 3], -0.75)], ids=str)
def test_the_gap_is_negative_if_the_choice_is_wrong(chosen: list[int], gap: float) -> None:
    scores = torch.tensor([[[0.8, 0.6, 0.4, 0.2]]])
    found = least_gap(scores, torch.tensor([[chosen]]))
    assert found == pytest.approx(gap, abs=1e-6)
    assert not SameExperts(0.0, found).is_border


@pytest.mark.parametrize("third", [0.5, 0.5 + 1e-6, 0.5 - 1e-6])
def test_one_token_at_a_border_is_found_among_others(third: float) -> None:
    scores = torch.tensor([[[0.8, 0.6, 0.4]], [[0.8, 0.5, third]], [[0.1, 0.6, 0.4]]])
    experts = torch.tensor([[[0, 1]], [[0, 1]], [[2, 1]]])
    assert SameExperts(0.0, least_gap(scores, experts)).is_border
    experts[0] = torch.tensor([0, 2])
    assert not SameExperts(0.0, least_gap(scores, experts)).is_border, "another token has a wrong expert"


def test_scores_of_a_model_show_one_wrong_expert_at_an_image() -> None:
    maker = DocumentMaker(directory := ensure_family("gemma4_26b"))
    prompt = Prompt(maker, [picture((140, 90), 1), "What is this?"])
    own = np.full((len(prompt.ids), LAYERS, TOP), -1)  # the trainer's router chooses
    (scores,) = router_scores(directory, [prompt], [own])
    assert scores.shape == (len(prompt.ids), LAYERS, 8)
    experts = scores.topk(TOP).indices
    assert torch.equal(router_scores(directory, [prompt], [experts.numpy()])[0], scores)
    assert least_gap(scores, experts) >= 0
    worst = scores[20, 3].argmin()
    experts[20, 3, 1] = worst
    (changed,) = router_scores(directory, [prompt], [experts.numpy()])
    assert torch.equal(changed[20, :4], scores[20, :4])
    assert not torch.equal(changed[20, 4], scores[20, 4]), "the layers above compute with the given expert"
    assert least_gap(changed, experts) < -100 * MOST_GAP
