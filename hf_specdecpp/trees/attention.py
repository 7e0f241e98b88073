"""Checks that a model computes the same logits in one pass over a token tree as over each path alone (`check_tree`).
`caches.masks` makes the inputs of such passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache

from hf_specdecpp.caches.batches import other_layers
from hf_specdecpp.caches.masks import MASKED, tree_inputs, unknown_window, why_no_holes
from hf_specdecpp.models import causal_lm
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.checks import check_target
from hf_specdecpp.models.foreign import foreign_code
from hf_specdecpp.models.quantised import multiplies_in_half
from hf_specdecpp.sampling.randomness import widest
from hf_specdecpp.trees.tree import relations

CHAIN = "Draft chains instead (tree=False)"  # the end of error messages
TREE_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Relative errors of the logits that rounding stays below; wrong masks and positions are far above. Some families
# compute partly in float32 in any dtype.
TREE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3}
HALF_TREE_TOLERANCE = 0.1

# Attention implementation and dtype with which a model has passed `check_tree`.
_passed: WeakKeyDictionary[CausalLM, tuple[str, torch.dtype]] = WeakKeyDictionary()


def check_tree(target: CausalLM, role: str = "target") -> None:
    """Raise `ValueError` unless one pass of `target` over a token tree gives the same logits as passes over its paths.

    `refuse_tree` first checks the model (`role` in messages). Then `tree_error` compares logits, unless it has done so
    before. Targets with foreign code, such as hooks, are tested during generation instead (`caches.trial`)."""
    refuse_tree(target, role)
    if has_read_tree(target) or (role == "target" and any(True for _ in foreign_code(target))):
        return
    subject = f"The {role} {type(target).__name__}"
    try:
        error = tree_error(target)
    except Exception as failure:  # a model's forward pass may raise errors of any class
        raise ValueError(f"{subject} fails on a token tree ({failure!r}). {CHAIN}.") from failure
    exact = None if multiplies_in_half(target) else TREE_TOLERANCE.get(target.dtype)
    tolerance = exact or HALF_TREE_TOLERANCE
    if not error <= tolerance:
        raise ValueError(
            f"{subject} reads a token tree differently from each of its paths: its logits are off by {error:.2g} of "
            f"their spread (rounding explains {tolerance:g}), so the output would be wrong. {CHAIN}."
        )
    _passed[target] = _way_to_read(target)


def check_trees(readers: Mapping[str, CausalLM]) -> None:
    """Call `check_tree` for each model; `readers`: models by role (`"target"`, ...)."""
    for role, model in readers.items():
        check_tree(model, role)


def refuse_tree(target: CausalLM, role: str = "target") -> None:
    """Raise `ValueError` if it is known without a pass that `target` (`role` in messages) cannot read token trees."""
    check_target(target, recurrent=True)
    subject, config = f"The {role} {type(target).__name__}", target.config.get_text_config(decoder=True)
    if (implementation := config._attn_implementation) not in MASKED:
        raise ValueError(
            f"{subject} runs attn_implementation={implementation!r}, which takes no mask of a tree's shape. Load it "
            f'with attn_implementation="sdpa", or call its set_attn_implementation("sdpa"). {CHAIN} otherwise.'
        )
    if (reason := _no_tree(target, config)) is not None:
        raise ValueError(f"{subject} {reason}, so it cannot read a token tree. {CHAIN}.")


def has_read_tree(target: CausalLM) -> bool:
    """Whether the model, with its present attention implementation and dtype, has passed the test of `check_tree`."""
    return _passed.get(target) == _way_to_read(target)


def _way_to_read(target: CausalLM) -> tuple[str, torch.dtype]:
    return target.config.get_text_config(decoder=True)._attn_implementation, target.dtype


def _no_tree(target: CausalLM, config: Any) -> str | None:
    """Why the model cannot read trees, as a clause for messages; `None` if no reason is known without running it."""
    if target.config.model_type == "paligemma":
        return "reads its prompt in both directions and counts positions from 1"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "measures distances along the rows of its cache (ALiBi)"
    if not causal_lm.takes_positions(target):
        return f"{causal_lm.why_no_positions(target)}, but siblings in a tree stand at one position"
    if (reason := why_no_holes(config)) is not None:
        return reason
    if getattr(config, "cross_attention_layers", None):
        return "keeps rows of another length in its cache (cross-attention)"
    types = set(getattr(config, "layer_types", None) or ())
    if unknown := types - TREE_LAYER_TYPES:
        return f"has layers of type {', '.join(sorted(unknown))}"
    if others := other_layers(DynamicCache(config=config).layers):
        return f"keeps {others} in its cache"
    return unknown_window(target, config)


# The tree of `tree_error`: each node's parent, in depth-first order, and the paths to its leaves, equally long.
TEST_PARENTS = [-1, 0, 1, 0, 3]
TEST_PATHS = [[0, 1, 2], [0, 3, 4]]
TEST_PREFIX = 2  # tokens before the tree


def tree_error(model: CausalLM) -> float:
    """Return the largest error of the model's logits in a pass over a small tree, compared with its paths read one by
    one, relative to how much logits differ between nodes. Makes three passes, over 10, 2 and 5 tokens."""
    device = causal_lm.input_device(model)
    with causal_lm.trying(model) as read:
        places = torch.arange(TEST_PREFIX + len(TEST_PARENTS), device=device)
        text, nodes = ((11 + 7 * places) % causal_lm.num_embeddings(model)).tensor_split([TEST_PREFIX])
        paths = torch.stack([torch.cat((text, nodes[path])) for path in TEST_PATHS])
        one_by_one = read(paths, use_cache=False).logits[:, len(text) :].to(widest(device))
        expected = one_by_one.new_empty((len(nodes), one_by_one.shape[-1]))
        for path, logits in zip(TEST_PATHS, one_by_one, strict=True):
            expected[path] = logits
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        arguments: dict[str, Any] = {causal_lm.cache_argument(model): cache, "use_cache": True}
        read(text[None], **arguments)
        cache.activate_past_recording()
        ancestors, depths = (each.to(device) for each in relations(TEST_PARENTS))
        inputs = tree_inputs(model, cache, ancestors, depths, num_prefix=len(text))
        logits = read(nodes[None], **arguments, **inputs).logits[0]
    difference = (logits.to(expected) - expected).norm(dim=-1).max()
    return float(difference / (expected - expected.mean(dim=0)).norm(dim=-1).mean())
