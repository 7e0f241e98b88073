"""Captured texts are plain generation's, and the same is drafted as uncaptured; on pretended graphs."""

import pytest
from support.capturing import SETTINGS, assert_captured_as_uncaptured
from support.models import quiet_later_layers, tiny

FAMILIES = ("llama", "gemma3_text", "mistral", "gpt2", "granite", "phi3")
KINDS = ("independent", "early_exit", "conditioned", "eagle3")
SEEDS = {("gemma3_text", "conditioned"): 4, ("granite", "eagle3"): 1}  # else their random drafts are never right


@pytest.mark.every(61, takes=4)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("pretended")
def test_captured_as_uncaptured(family: str, kind: str, name: str) -> None:
    """From a prompt of 3 tokens, and from a padded one whose text outgrows a room; texts longer than windows."""
    seed = SEEDS.get((family, kind), 0)
    assert_captured_as_uncaptured(kind, quiet_later_layers(tiny(family, seed)), **SETTINGS[name])
