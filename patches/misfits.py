"""Models whose own code would compute something else under a patch."""

from collections.abc import Collection, Iterator
from typing import Any

from transformers import PreTrainedModel

from turbo_hf.models.sources import functions_of, hands_indices, hands_on_mask, question
from turbo_hf.patches.generic import is_attention

HARMLESS = {
    "GPT2Attention.forward": "only upcasts its scores in eager mode; masks that it changes are those of an encoder",
}
"""Methods of Transformers that ask for the name of their attention, or change masks, without harm under a patch."""


def misfit(model: PreTrainedModel, replaced: Collection[str] = ()) -> str | None:
    """Why a model's own code would compute something else under a patch; None if it would not.

    Some classes ask whether their attention is called "eager" or "sdpa", and leave out a part of it if it is not. Some
    attention classes change the 4D mask that these two get, but a patch gives them a 2D mask or none. Such a model is
    wrong even with its layers in full precision. replaced: methods of its classes that the patch replaces.
    """
    text = model.config.get_text_config(decoder=True)
    modules = _language_modules(model, (type(text), type(model.config)))
    for kind in dict.fromkeys(type(module) for module in modules):
        attention = is_attention(kind)
        for function in functions_of(kind):
            known = function.__module__.startswith("transformers.models.") and function.__qualname__ in HARMLESS
            if function.__name__ in replaced or known or (function.__name__ == "forward" and hands_indices(kind)):
                continue
            line = question(function)
            if line is not None:
                return f'{kind.__name__} asks whether its attention is called "eager" or "sdpa" (`{line}`)'
            if attention and function.__name__ == "forward" and not hands_on_mask(function):
                return f"{kind.__name__} does not hand on its attention mask as it is, or its source cannot be read"
    return None


def _language_modules(module: Any, configs: tuple[type, ...]) -> Iterator[Any]:
    """A module and those in it, but no vision or audio towers: these have configs of their own."""
    yield module
    for child in module.children():
        config = getattr(child, "config", None)
        if config is None or isinstance(config, configs):
            yield from _language_modules(child, configs)
