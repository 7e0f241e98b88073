"""What a repository may say: each field at its bounds, and beyond them."""

import json
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.speculation import Decisions, SpeculationConfig
from hf_specdecpp.config.value_checks import BOUNDS, LISTS, check_layers, check_numbers

ROOT = Path(__file__).parents[2]
SOUND: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2
}  # fmt: skip
ODD: list[Any] = ["", "1", [[None]], float("nan"), float("inf"), 10**400, True]


@pytest.mark.parametrize("name", BOUNDS)
def test_numbers_at_their_bounds(name: str) -> None:
    bounds = BOUNDS[name]
    beyond = [bounds[0] - 1, bounds[-1] + 1, *([float(bounds[0])] if isinstance(bounds, range) else [])]
    for value in (None, bounds[0], bounds[-1], *([[bounds[0], bounds[-1]]] if name in LISTS else [])):
        check_numbers({name: value})
        check_numbers({"layer": {name: value}})
    for value in [*beyond, *ODD, [bounds[0] - 1], *([] if name in LISTS else [[bounds[0]]])]:
        for values in ({name: value}, {"layer": {name: value}}):
            with pytest.raises(ValueError, match=rf"^(layer\.)?{name}=.* must be a"):
                check_numbers(values)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="layer.attn_implementation is not known; it may be of a newer version"):
        check_layers({**SOUND, "attn_implementation": "kernels-community/x"})
    odd: Any
    for odd in ([], "text", 1, None):
        with pytest.raises(ValueError, match="layer=.* must be a mapping"):
            check_layers(odd)


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_hidden_layers": None}, "layer.num_hidden_layers is missing"),
    ({"num_key_value_heads": 3}, "layer.num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
    ({"rope_parameters": {"rope_type": "linear", "partial_rotary_factor": 0.5}}, "rotate a part of each head"),
])  # fmt: skip
def test_numbers_that_do_not_go_together(changes: dict[str, Any], message: str) -> None:
    check_layers(SOUND)
    with pytest.raises(ValueError, match=message):
        check_layers({**SOUND, **changes})


# Settings, and what the package decides in their place. ------------------------------


def test_an_unknown_setting_is_refused_with_the_names_of_all() -> None:
    known = ", ".join(SpeculationConfig.__dataclass_fields__)
    with pytest.raises(TypeError, match=f"There is no setting min_tokens. .*There are {known}"):
        SpeculationConfig(min_tokens=3)  # type: ignore[call-arg]
    config: Any = SpeculationConfig()
    with pytest.raises(
        AttributeError, match=f"There is no setting treshold. Did you mean threshold. There are {known}"
    ):
        config.treshold = 0.1


def test_stored_settings() -> None:
    with pytest.warns(UserWarning, match="does not know and ignores: beams"):
        assert SpeculationConfig.from_dict({"beams": 3, "threshold": 0.4}) == SpeculationConfig(threshold=0.4)
    with pytest.raises(ValueError, match="rule='svip' must be one of threshold, throughput"):
        SpeculationConfig.from_dict({"rule": "svip"})


@pytest.mark.parametrize("card", sorted(ROOT.glob("hub_cards/*/config.json")), ids=lambda card: card.parent.name)
def test_published_assistants_have_settings_of_today(card: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = SpecDecPPConfig.from_dict(json.loads(card.read_text(encoding="utf-8")))
        assert SpeculationConfig.from_dict(config.speculation).to_dict() == {**config.speculation, "tree": "auto"}


def test_copies() -> None:
    config = SpeculationConfig(tree=[[0], [1], [0, 0]], lookup="history")
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - our own bytes
    assert replace(config, threshold=0.5).shape == {(): 2, (0,): 1}
    assert SpeculationConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(("values", "says"), [
    ({"tree": "eagle"}, "not a kind of tree"),
    ({"tree_budget": 1}, "from 2 to 1024"),
    ({"tree_budget": 1025}, "from 2 to 1024"),
    ({"tree": [2000]}, "no level more than"),
    ({"tree_depth": 0}, "tree_depth=0 must be a whole number from 1"),
    ({"min_tokens": 0}, "min_tokens=0 must be a whole number from 1"),
    ({"draft_temperature": 0.0}, "draft_temperature=0.0 must be a number from 0.1 to 10"),
    ({"tree_threshold": 1.0}, "tree_threshold=1.0 must be a number from 0 to 0.99"),
    ({"verification": "beam"}, "verification='beam' must be one of block, token"),
])  # fmt: skip
def test_settings_and_decisions_that_make_no_sense(values: dict[str, Any], says: str) -> None:
    decided = values.keys() <= Decisions.__dataclass_fields__.keys()
    with pytest.raises(ValueError, match=says):
        Decisions(**values) if decided else SpeculationConfig(**values)
