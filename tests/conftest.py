"""Fixtures that several test files use."""

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.capturing import pretended  # noqa: F401 - a fixture
from support.devices.processor_time import pytest_runtest_call  # noqa: F401 - a hook
from support.enumeration.stock_rounds import enumerate_torch  # noqa: F401 - a fixture
from support.files.repos import save_model
from support.runs.hub_server import HubServer, point_client_at
from support.targets.models import partly_agreeing, tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdecpp.models import loading
from hf_specdecpp.models.target_states import RETURNS_CHOSEN
from hf_specdecpp.throughput import known_costs


@pytest.hookimpl(tryfirst=True)  # before cases are deselected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`@pytest.mark.daily("llama-chain", "*-tree")`: of a test's cases those with these names stay fast, and the others
    become slow. A name of no case is an error, unless cases were asked for by name, or this transformers lacks some."""
    unknown: dict[str, set[str]] = {}
    for item in items:
        if (mark := item.get_closest_marker("daily")) is None:
            continue
        test, _, case = item.nodeid.removesuffix("]").partition("[")
        found = {name for name in mark.args if re.fullmatch(re.escape(name).replace(r"\*", ".*"), case)}
        if not found:
            item.add_marker("slow")
        unknown[test] = unknown.get(test, set(mark.args)) - found
    if RETURNS_CHOSEN and not any("::" in argument for argument in config.args) and any(unknown.values()):
        raise pytest.UsageError(
            f"Cases that are not there: { {test: names for test, names in unknown.items() if names} }"
        )


def pytest_collection_finish() -> None:
    """What is imported stays: that the garbage collector looks at all of it again and again takes a seventh of the
    tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of costs yet."""
    monkeypatch.setattr(known_costs, "_known", {})


@pytest.fixture
def assumed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs stay as they are assumed before the first round, so that no rule follows the clock of this machine."""
    monkeypatch.setattr(known_costs.KnownCosts, "update", lambda costs, times: [])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """An empty Hub that this process talks to, with a token, and an empty cache. Tests use the same ids again."""
    with HubServer() as server:
        point_client_at(monkeypatch, server, tmp_path / "cache", token="secret")
        loading._load_tokenizer.cache_clear()
        yield server
    loading._load_tokenizer.cache_clear()


@pytest.fixture
def target(tmp_path: Path) -> PreTrainedModel:
    """A target with a tokenizer beside it."""
    return AutoModelForCausalLM.from_pretrained(save_model(tiny("llama"), tmp_path / "target"))


@pytest.fixture
def draft(target: PreTrainedModel, tmp_path: Path) -> str:
    """The folder of a draft that agrees with the target in part."""
    return save_model(partly_agreeing(target), tmp_path / "draft")
