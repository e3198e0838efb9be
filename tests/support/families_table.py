"""Tries every decoder-only family of Transformers, as tiny random models, and writes a page of what came of it.

python tests/support/families_table.py --out eval/results/families.json --page docs/models.md    all: some minutes
python tests/support/families_table.py --only llama,gpt_neox    these alone, to the screen; exits with 1 if one is wrong

Pages of 16 bits hold float16. So the patched model is measured against the unpatched one with a cache that rounds to
float16 what the patched one stores, and may differ from it by about what that rounding itself changes: a token may
be another one only where two were as close as that.
"""

import argparse
import contextlib
import json
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from budgets import SLACK
from choices import flat_config
from models import left_padded
from patching_support import changes, snapshot
from tiny_families import VARIANTS, build, families
from tiny_multimodal import MODELS, build_multimodal, medium, prompt
from torch import Tensor
from transformers import Cache

import turbo_hf
from turbo_hf import TurboCache
from turbo_hf.models.versions import CACHE

# --- ways to generate, with the patch and without, compared ---------------------------------------------------------

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


# --- rows ------------------------------------------------------------------------------------------------------------

CONFIG = flat_config(bits=16, attention="native", block_size=32)
SEEDS = 5
"""How many prompts are tried."""

WORKS, REFUSED, NOT_TRIED, WRONG = "works", "refused", "not tried", "WRONG"
FAILS = "unpatched fails"
COLUMNS = (*MODES, "un-patch")
BLIND = "the unpatched model's tokens hardly depend on the prompt"


@dataclass
class Row:
    """What came of one model. modes: of each column. sentence: why it is refused, not tried or wrong. medium: what a
    multimodal class was shown."""

    family: str
    variant: str = ""
    model: str = ""
    outcome: str = NOT_TRIED
    sentence: str = ""
    layers: str = ""
    medium: str = ""
    modes: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Family and variant."""
        return f"{self.family}, {self.variant}" if self.variant else self.family


def examine(family: str, variant: str = "") -> Row:
    """Try one family in this process: with other prompts, as long as rounding chooses a token of the answer."""
    for seed in range(SEEDS):
        row = Row(family, variant)
        with contextlib.suppress(_Settled), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _examine(row, seed)
        if TIES not in row.modes.values():
            break
    return row


def examine_multimodal(family: str) -> Row:
    """Try one multimodal class in this process: a row of text with an image or a sound."""
    row = Row(family, model=str(MODELS[family]))
    with contextlib.suppress(_Settled), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _examine_multimodal(row)
    return row


def _examine_multimodal(row: Row) -> None:
    try:
        model = build_multimodal(row.family)
        text, media = prompt(model)
        inputs, row.medium = {**text, **media}, medium(media)
        plain = generate(model, inputs)
    except Exception as error:
        raise _Settled from error
    if plain.cache is None:
        raise _Settled
    for strict in ("raise", "warn"):
        try:
            with turbo_hf.patch(model, CONFIG, strict=strict) as handle:
                ours, reports = generate(model, inputs), handle.report().layers
        except turbo_hf.Unsupported as error:
            row.outcome, row.sentence = REFUSED, row.sentence or str(error)
            continue
        except Exception as error:
            row.outcome, row.sentence = WRONG, _short(error)
            raise _Settled from error
        row.layers, compressed = _layers(reports), [at.index for at in reports if at.groups]
        with half_cache(compressed):
            said = _unused(ours.cache, compressed) or verdict(ours, plain, generate(model, inputs))
        if said.startswith(WRONG):
            row.outcome, row.sentence = WRONG, said
        elif row.outcome == REFUSED:
            row.sentence += ' With `strict="warn"` it works: that prompt alone is computed in full precision.'
        else:
            row.outcome, row.modes = WORKS, {"batch": said}
        return


class _Settled(Exception):
    """Nothing more is to be tried."""


def _examine(row: Row, seed: int) -> None:
    try:
        model: Any = build(row.family, row.variant)
        row.model = type(model).__name__
        inputs = _inputs(row, model, seed)
    except Exception as error:
        row.sentence = f"the unpatched model fails: {_short(error)}"
        raise _Settled from error
    # some keep a state in their modules, which passes replace
    before, plain = snapshot(model), dict[str, Answer]()
    for name, mode in MODES.items():
        if "batch" not in plain and mode is second_turn:
            # it goes on from there
            row.modes[name] = row.modes["batch"]
            continue
        try:
            answer = mode(model, inputs)
        except Exception as error:
            row.modes[name] = f"{FAILS}: {_short(error)}"
        else:
            forgotten = _forgotten(answer, inputs)
            if forgotten:
                row.modes[name] = f"{FAILS}: {forgotten}"
            else:
                plain[name] = answer
    if {"batch", "chunks"} <= set(plain) and _differ(plain["chunks"], plain["batch"]):
        row.notes.append("unpatched, chunks change its answers")
    logits = _logits(model, inputs)
    after = snapshot(model)
    own = changes(before, after)
    handle = _patch(row, model)
    reports = handle.report().layers
    compressed = [at.index for at in reports if at.groups]
    row.layers = _layers(reports)
    ours: dict[str, Answer] = {}
    with handle:
        for name in plain:
            try:
                ours[name] = MODES[name](model, inputs)
            except turbo_hf.Unsupported as error:
                row.modes[name] = f"refused: {error}"
            except Exception as error:
                row.modes[name] = f"{WRONG}: {_short(error)}"
            else:
                row.modes[name] = _unused(ours[name].cache, compressed)
    changed = changes(after, snapshot(model)) - own
    if changed:
        row.modes["un-patch"] = f"{WRONG}: {len(changed)} attributes have changed, such as {min(changed)}"
    else:
        exact = torch.equal(_logits(model, inputs), logits)
        row.modes["un-patch"] = "exact" if exact else f"{WRONG}: logits have changed"
    with half_cache(compressed):
        for name, answer in ours.items():
            row.modes[name] = row.modes[name] or verdict(answer, plain[name], MODES[name](model, inputs))
    _conclude(row)


def _forgotten(answer: Answer, inputs: Inputs) -> str:
    """A sentence if a cache that counts its tokens has lost some of the answer's; "" if not."""
    expected = inputs["input_ids"].shape[1] + NEW - 1
    # a cache without attention counts none
    with contextlib.suppress(AttributeError, ValueError):
        if answer.cache.get_seq_length() < expected:
            return f"its cache ends with {answer.cache.get_seq_length()} tokens, and should have {expected} or more"
    return ""


def _inputs(row: Row, model: Any, seed: int) -> Inputs:
    """A padded batch; one without padding, if the unpatched model answers otherwise to padded rows than to them alone.

    Notes that, and whether the answers depend on prompts at all.
    """
    inputs = prompts(model, seed=seed)
    answer = generate(model, inputs)
    if answer.logits is None or not answer.logits.isfinite().all():
        row.sentence = "the unpatched model gives NaN or Inf"
        raise _Settled
    if torch.equal(answer.tokens[0], answer.tokens[1]) or answer.tokens.unique().numel() < 3:
        row.notes.append(BLIND)
    for i, mask in enumerate(inputs["attention_mask"]):
        ids = inputs["input_ids"][i : i + 1, mask.bool()]
        alone = generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        if _differ(alone, Answer(answer.tokens[i : i + 1], answer.logits[:, i : i + 1], None, None)):
            row.notes.append("unpatched, padding changes its answers: tried without")
            return prompts(model, EVEN, seed)
    unmasked = generate(model, {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])})
    if not _differ(unmasked, answer):
        row.notes.append("padding would not show")
    return inputs


def _differ(one: Answer, other: Answer) -> bool:
    """Whether the unpatched model gives two different answers, by more than rounding. No verdict hangs on it."""
    assert other.logits is not None
    return float(apart(one, other).max()) > 1e-3 * float(other.logits.std(-1).mean())


def _patch(row: Row, model: Any) -> Any:
    """A patch; if it is refused, one that leaves to Hugging Face what is refused."""
    try:
        return turbo_hf.patch(model, CONFIG)
    except turbo_hf.Unsupported as error:
        row.outcome, row.sentence = REFUSED, str(error)
    except Exception as error:
        row.outcome, row.sentence = WRONG, f"patch: {_short(error)}"
        raise _Settled from error
    try:
        return turbo_hf.patch(model, CONFIG, strict="warn")
    except turbo_hf.Unsupported as error:
        raise _Settled from error


def _conclude(row: Row) -> None:
    wrong = [f"{name}: {what}" for name, what in row.modes.items() if what.startswith(WRONG)]
    refused = [what for what in row.modes.values() if what.startswith("refused")]
    if wrong:
        row.outcome, row.sentence = WRONG, "; ".join(wrong)
    elif len(refused) == len(MODES):
        row.outcome, row.sentence = REFUSED, refused[0].removeprefix("refused: ")
    elif BLIND in row.notes:
        row.sentence = BLIND
    elif all(row.modes[name].startswith(FAILS) for name in MODES):
        row.sentence = row.modes["batch"]
    elif row.outcome != REFUSED:
        row.outcome = WORKS
    elif len(row.modes) == len(COLUMNS) and not refused:
        row.sentence += f' With `strict="warn"` it works: {row.layers}.'


def _unused(cache: Any, compressed: list[int]) -> str:
    """A sentence if not all layers that the report calls compressed hold tokens of the answer; "" if they do."""
    if not isinstance(cache, TurboCache):
        return f"{WRONG}: the answer's cache is a {type(cache).__name__}"
    empty = [at for at in compressed if not cache.get_seq_length(at)]
    return f"{WRONG}: layers {empty} of the cache are empty" if empty else ""


@torch.no_grad()
def _logits(model: Any, inputs: Inputs) -> Tensor:
    return torch.as_tensor(model(**inputs).logits)


def _layers(reports: Any) -> str:
    dense: dict[str, int] = {}
    for at in reports:
        if not at.groups:
            dense[at.reason] = dense.get(at.reason, 0) + 1
    kept = [f"{count} dense ({why})" for why, count in dense.items()]
    return "; ".join([f"{sum(bool(at.groups) for at in reports)} of {len(reports)}", *kept])


def _short(error: BaseException) -> str:
    """An error in a line, with the place that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}{'...' * (len(text) > 160)} ({Path(frame.filename).name})"


def run(names: Iterable[str], multimodal: Iterable[str] = ()) -> Iterator[Row]:
    """A row for each config of these families, and for each multimodal class."""
    for family in names:
        for variant in ("", *VARIANTS.get(family, {})):
            yield examine(family, variant)
    yield from map(examine_multimodal, multimodal)


def record(rows: list[Row], left_out: dict[str, list[str]], multimodal: list[Row]) -> dict[str, Any]:
    """All that was seen, as JSON: eval/results/families.json. What a row has nothing of is left out of it."""
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "families": [_recorded(row, "model") for row in rows],
        "left_out": left_out,
        "multimodal": [_recorded(row, "family") for row in multimodal],
    }


def _recorded(row: Row, other_name: str) -> dict[str, Any]:
    seen = {name: value for name, value in asdict(row).items() if value and name != other_name}
    kept = {"family", "variant", "model", "outcome", "sentence"} if row.outcome != WORKS else seen
    return {name: value for name, value in seen.items() if name in kept}


def page(found: dict[str, Any]) -> str:
    """docs/models.md, of what `record` gives."""
    rows = [Row(**fields) for fields in found["families"]]
    multimodal = [Row(**{"family": "", **fields}) for fields in found["multimodal"]]
    works = [row for row in rows if row.outcome == WORKS]
    parts = [
        INTRODUCTION.format(**found, tried=len(rows)),
        f"## Works: {len({row.family for row in works})} families\n",
        _table(("layers in full precision", "families"), _lists(works, _dense)),
        *(f"- {note}: {names}." for note, names in _lists(works, _notes)),
        "",
    ]
    for outcome, title in TITLES.items():
        listed = [row for row in rows if row.outcome == outcome]
        if listed:
            parts += [f"## {title}: {len({row.family for row in listed})}\n"]
            parts += [_table(("why", "families"), _lists(listed, _why))]
    same = [reason for reason in found["left_out"] if reason.startswith(SAME)]
    others = [reason for reason in found["left_out"] if reason not in same]
    equal = ", ".join(f"`{name}` (`{why.removeprefix(SAME)}`)" for why in same for name in found["left_out"][why])
    parts += [LEFT_OUT.format(others="; ".join(others), equal=equal), *_multimodal(multimodal)]
    return "\n".join(parts).rstrip() + "\n"


def _multimodal(rows: list[Row]) -> list[str]:
    """The page's part about multimodal classes."""
    by = {outcome: [row for row in rows if row.outcome == outcome] for outcome in (WORKS, *TITLES)}
    count = {"tried": len(rows), "works": len(by[WORKS]), "refused": len(by[REFUSED]), "rest": len(by[NOT_TRIED])}
    return [
        MULTIMODAL.format(**count),
        _table(("shown", "classes that give the unpatched tokens"), _lists(by[WORKS], lambda row: [row.medium])),
        _table(("why it is refused", "classes"), _lists(by[REFUSED], _why)),
        *([_table(("wrong", "classes"), _lists(by[WRONG], _why))] if by[WRONG] else []),
    ]


def _lists(rows: list[Row], reasons: Callable[[Row], list[str]]) -> list[list[str]]:
    """(reason, the rows that have it) for each reason. A variant is named where its family is not."""
    lists: dict[str, list[Row]] = {}
    for row in rows:
        for reason in reasons(row):
            lists.setdefault(reason, []).append(row)
    cells = []
    for reason, these in lists.items():
        plain = {row.family for row in these if not row.variant}
        names = [f"`{row.family or row.model}`" + f" ({row.variant})" * bool(row.variant) for row in these]
        kept = [name for name, row in zip(names, these, strict=True) if not (row.variant and row.family in plain)]
        cells.append([reason, ", ".join(kept)])
    return cells


def _dense(row: Row) -> list[str]:
    _, *kept = row.layers.split("; ")
    return ["; ".join(sorted({why.partition("(")[2].removesuffix(")") for why in kept})) or "none"]


def _notes(row: Row) -> list[str]:
    return [*row.notes, *(f"{name}: {said}" for name, said in row.modes.items() if said not in ("yes", "exact"))]


def _why(row: Row) -> list[str]:
    """The first sentence, without the name of the class and what stands in brackets."""
    sentence = row.sentence.partition(" can be compressed: ")[2] or row.sentence
    first = re.sub(r" \([^()]*(\([^()]*\))?[^()]*\)|, nor anything that is known here", "", sentence).partition(". ")[0]
    return [first.removesuffix(".") + ' (works with `strict="warn"`)' * (" it works: " in sentence)]


def _table(head: tuple[str, ...], cells: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([text.replace("|", "\\|") for text in row] for row in cells)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


TITLES = {REFUSED: "Refused", NOT_TRIED: "Not tried", WRONG: "Wrong"}

INTRODUCTION = """# Models

Every decoder-only family of Transformers {transformers}, tried with `turbo_hf.patch` on tiny random models
({tried} configs, torch {torch}, on a CPU). A script writes this page, and
[families.json](../eval/results/families.json) with each whole sentence:

```bash
python tests/support/families_table.py --out eval/results/families.json --page docs/models.md
```

"Works" means that attention and cache are right; how accurate few bits are, `turbo-hf eval` says. Over 16-bit pages the
patched model chose the unpatched one's tokens, with logits as near as a float16 cache allows: in a left-padded batch,
beams, chunks (`prefill_chunk_size`), and a second turn. After `remove()` logits were bit-identical. Continuous batching
serves families all of whose layers are compressed, with heads of one number and size.
"""

SAME = "the same class as "
"""How `families` begins the reason of a family whose class is tried as another one."""

LEFT_OUT = """## Left out

Not decoder-only by themselves: {others}. Tried under the name of another family with the same class: {equal}.
"""

MULTIMODAL = """## Multimodal classes

Of the {tried} classes of `AutoModelForMultimodalLM`, {works} work, {refused} are refused, and {rest} were not tried (no
tiny config or input was found by rule).
"""


def main(given: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Tries every decoder-only family of Transformers, as tiny models.")
    parser.add_argument("--out", type=Path, help="write what was seen to this JSON file")
    parser.add_argument("--page", type=Path, help="write the page to this file; without it, to the screen")
    parser.add_argument("--only", help="names of families, separated by commas")
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    names, left_out = families()
    # of families with one class, the first
    multimodal = [*{name: family for family, name in reversed(MODELS.items())}.values()][::-1]
    if arguments.only:
        chosen = arguments.only.split(",")
        unknown = sorted(set(chosen) - {*names, *multimodal})
        if unknown:
            parser.error(f"unknown families: {', '.join(unknown)}. Known: {', '.join([*names, *multimodal])}.")
        names, left_out = [name for name in chosen if name in names], {}
        multimodal = [name for name in chosen if name in multimodal]
    rows = []
    for row in run(names, multimodal):
        rows.append(row)
        sys.stderr.write(f"{row.name}: {row.outcome} {row.sentence}\n")
    found = record(rows[: len(rows) - len(multimodal)], left_out, rows[len(rows) - len(multimodal) :])
    for file, text in ((arguments.out, json.dumps(found, indent=1) + "\n"), (arguments.page, page(found))):
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    if not arguments.page:
        sys.stdout.write(page(found))
    return int(any(row.outcome == WRONG for row in rows))


if __name__ == "__main__":
    sys.exit(main())
