"""Names for types that transformers does not annotate well enough."""

from typing import Any, TypeAlias

# A `PreTrainedModel` with `GenerationMixin` and an LM head. The annotations of `PreTrainedModel` know neither its
# methods for generation nor that its attributes are what they are, so a checker is told nothing about it.
CausalLM: TypeAlias = Any
