"""Group normalisation with shortcut and ReLU over lanes against autograd."""

import pytest
import torch

from group_norm_cases import CASES, distances, draw, found_by_form, wanted


@pytest.mark.parametrize("case", CASES, ids=str)
def test_group_normalisation_has_the_gradients_of_autograd(case):
    drawn = draw(case, dtype=torch.float64)
    assert max(distances(wanted(case, *drawn), found_by_form(case, *drawn)).values()) < 1e-12
