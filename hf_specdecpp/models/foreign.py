"""Code of others in the passes of a target: hooks, patched forwards, replaced layers (`foreign_passes`).

Such code may depend on how many tokens a pass reads, as a hook does that changes the last row alone. So passes over
several tokens are compared with passes over fewer before a text relies on them (`generation.prefix.Trial`), and what
was found is kept here for later texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch.nn.modules import module as every_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specdecpp.models.causal_lm import CausalLM, modules_of

# Packages whose hooks, forwards and layers treat every token of a pass alike: what models are made of, and what
# quantises, adapts, spreads and trains them.
KNOWN = {
    "torch", "transformers", "hf_specdecpp", "accelerate", "peft", "trl", "deepspeed", "kernels",
    "aqlm", "auto_round", "awq", "bitsandbytes", "compressed_tensors", "eetq", "fbgemm_gpu", "fp_quant", "gptqmodel",
    "hqq", "optimum", "quark", "spqr_quant", "torchao", "vptq",
}  # fmt: skip


@dataclass
class ForeignPasses:
    """What is known of the passes of a target that run code of others.

    Attributes:
        name: of the code, for messages; where there are several pieces, of the first.
        width: so many tokens may be read at once.
        reason: why calls are plain, once that is known.
    """

    name: str
    width: int = 1
    reason: str | None = None


# Of each target: the code that was found, and what is known of the passes that run it.
_known: WeakKeyDictionary[CausalLM, tuple[list[Any], ForeignPasses]] = WeakKeyDictionary()


def foreign_passes(model: CausalLM, cache: Any = None) -> ForeignPasses | None:
    """What is known of passes that run code of others over a cache; `None` where no such code is found. Nothing is
    known yet where other code was found in the last call."""
    found = list(_foreign_code(model, cache))
    if not found:
        return None
    code = [key for _, key in found]
    known = _known.get(model)
    if known is None or known[0] != code:
        known = _known[model] = code, ForeignPasses(found[0][0])
    return known[1]


def runs_foreign_code(model: CausalLM) -> bool:
    return any(True for _ in _foreign_code(model, None))


def is_foreign(code: Any, home: str | None = None) -> bool:
    """Whether a function, or what it is wrapped around, comes from a package that is not known, nor from the module
    `home`. Names do not tell: `functools.wraps` copies them."""
    left = [code]
    for each in left:
        own = getattr(each, "__dict__", {})
        left += [own[name] for name in ("__wrapped__", "_torchdynamo_orig_callable") if name in own]
        if isinstance(each, partial | MethodType):
            left.append(each.func if isinstance(each, partial) else each.__func__)
            continue
        known = each.__globals__.get("__name__", "") if isinstance(each, FunctionType) else type(each).__module__
        if known.partition(".")[0] not in KNOWN and known != home:
            return True
    return False


def _foreign_code(model: CausalLM, cache: Any) -> Iterator[tuple[str, Any]]:
    """Each piece of code by its name, and by a key that no other piece has had: hooks have numbers."""
    together = {**every_module._global_forward_pre_hooks, **every_module._global_forward_hooks}
    for number, hook in together.items():
        if is_foreign(hook):
            yield f"{_name(hook)}, a hook of all modules", number
    kinds = {}
    for module in modules_of(model):
        own = vars(module)
        kinds[type(module)] = type(module).__name__
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number, hook in hooks.items() if hooks else ():
                if is_foreign(hook):
                    yield f"{_name(hook)}, a hook of {type(module).__name__}", number
        if "forward" in own and is_foreign(own["forward"]):
            yield f"{_name(own['forward'])} in the place of a forward of {type(module).__name__}", _key(own["forward"])
        if "_hf_hook" in own:  # accelerate's, of a class that may be anybody's
            for hook in getattr(own["_hf_hook"], "hooks", [own["_hf_hook"]]):
                if is_foreign(hook):
                    yield f"{type(hook).__name__}, a hook of {type(module).__name__}", _key(hook)
    for kind, name in kinds.items():
        for method in ("forward", "__call__"):
            code = getattr(kind, method)
            if is_foreign(code, _own_home(kind, method, model)):
                yield f"{_name(code)} as a forward of {name}", _key(code)
    implementation = str(model.config.get_text_config(decoder=True)._attn_implementation)
    attention = ALL_ATTENTION_FUNCTIONS.get(implementation)
    if attention is not None and "/" not in implementation and is_foreign(attention):  # else a kernel of the Hub
        yield f"{_name(attention)} as attention", _key(attention)
    layers = {type(layer): layer for layer in (() if cache is None else cache.layers)}
    for each in (*(() if cache is None else (cache,)), *layers.values()):
        if is_foreign(each.update):
            yield f"{_name(each.update)} of {type(each).__name__}", _key(vars(each).get("update", type(each).update))


def _own_home(kind: type[Any], method: str, model: CausalLM) -> str | None:
    """The module whose code is a model's own where a class of it has the method: one of the package that the model's
    class is of."""
    owner = next(each for each in kind.__mro__ if method in vars(each))
    same_package = owner.__module__.partition(".")[0] == type(model).__module__.partition(".")[0]
    return owner.__module__ if same_package else None


def _name(code: Any) -> str:
    """Such as "steer (mine.hooks)"."""
    while isinstance(code, partial):
        code = code.func
    name, home = getattr(code, "__name__", type(code).__name__), getattr(code, "__module__", None)
    return f"{name} ({home})"


def _key(code: Any) -> Any:
    """What only this very object is equal to, also once it is gone: an address may be used again."""
    try:
        return ref(code)
    except TypeError:  # compared anew with each call
        return object()
