"""Settings of today and of earlier versions, and what the package decides in their place."""

import pickle
import warnings
from dataclasses import replace
from typing import Any

import pytest

from hf_specdecpp import SpeculationConfig
from hf_specdecpp.config.speculation import REMOVED, Decisions


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_setting_says_what_takes_its_place(name: str) -> None:
    values: dict[str, Any] = {name: 1}
    with pytest.raises(ValueError, match=f"{name} is no setting any more. [A-Za-z]"):
        SpeculationConfig(**values)
    config = SpeculationConfig()
    with pytest.raises(ValueError, match=f"{name} is no setting any more"):
        setattr(config, name, 1)


@pytest.mark.parametrize("name", REMOVED)
def test_only_of_what_is_decided_it_says_that_the_package_decides(name: str) -> None:
    says = {"The package decides that" in REMOVED[name], "assistant.decisions" in REMOVED[name]}
    assert says == {name in Decisions.__dataclass_fields__}


def test_a_setting_that_never_was_is_an_error() -> None:
    with pytest.raises(TypeError, match="beams"):
        SpeculationConfig(beams=3)  # type: ignore[call-arg]
    config: Any = SpeculationConfig()
    with pytest.raises(AttributeError, match="There is no setting treshold. Did you mean threshold?"):
        config.treshold = 0.1


def test_stored_settings_of_earlier_versions_are_read_silently() -> None:
    stored = {"rule": "threshold", "threshold": 0.4, "min_tokens": 2, "adapt": False, "pack_weights": True}
    shapes = {"tree": "static", "tree_shape": [2, 1], "tree_depth": 3, "lookup": True, "lookup_memory": 500}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SpeculationConfig.from_dict(stored) == SpeculationConfig("threshold", threshold=0.4)
        assert SpeculationConfig.from_dict(shapes) == SpeculationConfig(tree=[2, 1], lookup="history")
    with pytest.warns(UserWarning, match="does not know and ignores: beams"):
        SpeculationConfig.from_dict({"beams": 3})


def test_copies() -> None:
    config = SpeculationConfig(tree=[[0], [1], [0, 0]], lookup="history")
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - our own bytes
    assert replace(config, threshold=0.5).shape == {(): 2, (0,): 1}
    assert SpeculationConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"tree_depth": 0}, "tree_depth=0 must be from 1"),
        ({"min_tokens": 0}, "min_tokens=0 must be from 1"),
        ({"draft_temperature": 0.0}, "draft_temperature=0.0 must be from 0.1 to 10"),
        ({"tree_threshold": 1.0}, "nothing could be drawn"),
        ({"verification": "beam"}, "verification='beam' must be one of block, token"),
    ],
)
def test_decisions_that_make_no_sense(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Decisions(**values)
