"""What a family's table row is made from: ways to generate, with the patch and without, compared.

Pages of 16 bits hold float16. So the patched model is measured against the unpatched one with a cache that rounds to
float16 what the patched one stores, and may differ from it by about what that rounding itself changes: a token may
be another one only where two were as close as that.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from budgets import SLACK
from models import left_padded
from torch import Tensor
from transformers import Cache

from turbo_hf.models.versions import CACHE

LENGTHS = (70, 52, 37)
EVEN = (70, 70, 70)
NEW = 12
CHUNK = 19
TURN = 7
BEAMS = 3
TIES = "yes, but for ties"
DECODE_TOKENS = 16
"""Up to this many new tokens are stored before attention reads a TurboCache."""


class Answer(NamedTuple):
    """tokens: [rows, NEW]. logits: [NEW, rows, vocabulary]; None from beams, which have scores [rows]."""

    tokens: Tensor
    logits: Tensor | None
    scores: Tensor | None
    cache: Any


Inputs = dict[str, Tensor]


@contextlib.contextmanager
def half_cache(layers: Collection[int]) -> Iterator[None]:
    """Within, Transformers' own caches keep tokens of these layers in float16; a prompt's own are seen as they came."""
    store = Cache.update

    def update(cache: Cache, k: Tensor, v: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if layer_idx not in layers:
            return store(cache, k, v, layer_idx, *args, **kwargs)
        tokens, past = k.shape[2], cache.get_seq_length(layer_idx)
        keys, values = store(cache, k.half().to(k.dtype), v.half().to(v.dtype), layer_idx, *args, **kwargs)
        if past and tokens <= DECODE_TOKENS:
            return keys, values
        return torch.cat((keys[:, :, :-tokens], k), 2), torch.cat((values[:, :, :-tokens], v), 2)

    with mock.patch.object(Cache, "update", update):
        yield


def prompts(model: Any, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> Inputs:
    """Prompts of these lengths, padded at the left."""
    generator = torch.Generator().manual_seed(seed)
    return left_padded([torch.randint(3, vocabulary(model), (length,), generator=generator) for length in lengths])


def generate(model: Any, inputs: Inputs, **options: Any) -> Answer:
    """NEW greedy tokens of each row."""
    how = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(**inputs, **how, **options)
    beams = options.get("num_beams", 1) > 1
    return Answer(
        tokens=out.sequences[:, inputs["input_ids"].shape[1] :],
        logits=None if beams else torch.stack(out.logits),
        scores=out.sequences_scores if beams else None,
        cache=getattr(out, CACHE, None),
    )


def beams(model: Any, inputs: Inputs) -> Answer:
    """Beam search."""
    return generate(model, inputs, num_beams=BEAMS, output_scores=True)


def chunks(model: Any, inputs: Inputs) -> Answer:
    """The prompt in parts."""
    return generate(model, inputs, prefill_chunk_size=CHUNK)


def second_turn(model: Any, inputs: Inputs) -> Answer:
    """The answer to more tokens after a first answer, on its cache."""
    first = generate(model, inputs)
    if first.cache is None:
        raise TypeError("generate returns no cache to go on with")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    added = torch.randint(3, vocabulary(model), (len(ids), TURN), generator=torch.Generator().manual_seed(1))
    longer = torch.nn.functional.pad(mask, (0, NEW + TURN), value=1)
    whole = {"input_ids": torch.cat((ids, first.tokens, added), 1), "attention_mask": longer}
    return generate(model, whole, **{CACHE: first.cache})


MODES: dict[str, Callable[[Any, Inputs], Answer]] = {
    "batch": generate,
    "beams": beams,
    "chunks": chunks,
    "second turn": second_turn,
}


def vocabulary(model: Any) -> int:
    """Size of the model's vocabulary."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def apart(one: Answer, other: Answer) -> Tensor:
    """How far two answers differ: for each row and step, up to where they part; for each row, from beams."""
    if one.logits is None or other.logits is None:
        assert one.scores is not None
        assert other.scores is not None
        return (one.scores - other.scores).abs()
    differs = (one.tokens != other.tokens).cumsum(1)
    # the step at which a row parts is still one answer to the same question
    shared = torch.nn.functional.pad(differs[:, :-1], (1, 0)) == 0
    return (one.logits - other.logits).abs().amax(-1).T[shared]


def verdict(ours: Answer, plain: Answer, half: Answer) -> str:
    """ "yes", perhaps with other tokens where rounding decides, or what is wrong. half: as plain, in `half_cache`.

    What rounding changes is the median over the tokens that it changes: a few may tip something over, such as a router.
    It is a measure of what is left, too: in deep layers, keys on the edge between two float16 numbers fall on either
    side.
    """
    changed = apart(plain, half)
    off, rounding = float(apart(ours, half).max()), float(changed[changed > 0].median()) if changed.any() else 0.0
    if not off <= SLACK * rounding:
        return f"WRONG: off by {off:.2g}, where rounding to float16 makes {rounding:.2g}"
    return "yes" if torch.equal(ours.tokens, plain.tokens) else TIES
