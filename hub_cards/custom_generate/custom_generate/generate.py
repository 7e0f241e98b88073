"""`model.generate(..., custom_generate="org/specdecpp")`: faster, with the same output, by hf_specdecpp."""

from weakref import WeakKeyDictionary

from hf_specdecpp import SpeculationConfig, assist

# By model and by name, since loading one takes longer than an answer.
_assistants = WeakKeyDictionary()


def generate(inputs=None, *, model, assistant=None, speculation=None, **arguments):
    """What `generate()` returns, with an assistant that drafts for this call only.

    Args:
        inputs, arguments: those of `generate()`.
        model: what `generate()` was called on.
        assistant: Hub id or folder of an assistant for this model, or of an EAGLE-3 or DFlash draft. By default nothing
            drafts, and candidates are looked up in the text.
        speculation: settings of a run, such as `{"rule": "throughput"}`; by default the assistant's own.

    Where the assistant cannot help, with beams for instance, the call is a plain one, and a warning says why.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if given.get("assistant_model") is not None:
        raise ValueError(
            "assistant_model= needs no custom_generate=: leave that out. Here assistant= names what drafts, such as "
            "'org/head'."
        )
    helper, own = _assistant_for(model, assistant)
    helper.speculation = own if speculation is None else SpeculationConfig(**speculation)
    with helper.as_default(model):
        # Of the class: a model that was loaded from a repository with this file has this function as its own.
        return type(model).generate(model, inputs, **given)


def _assistant_for(model, name):
    """An assistant that is attached to the model, and its own settings."""
    known = _assistants.setdefault(model, {})
    if name not in known:
        helper = assist(model, name or "lookup", default=False)
        known[name] = helper, helper.speculation
    return known[name]
