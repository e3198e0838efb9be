"""Tries every decoder-only family of Transformers, as tiny random models, and writes a page of what came of it.

python tests/support/families_table.py --out docs/models.md    all families: some minutes
python tests/support/families_table.py --only llama,gpt_neox   these alone, to the screen; exits with 1 if one is wrong
"""

import argparse
import contextlib
import multiprocessing
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from families_modes import (
    EVEN,
    MODES,
    NEW,
    TIES,
    Answer,
    Inputs,
    apart,
    generate,
    half_cache,
    prompts,
    second_turn,
    verdict,
)
from patching_support import changes, snapshot
from tiny_families import VARIANTS, build, families
from tiny_multimodal import MODELS, build_multimodal, medium, prompt
from torch import Tensor

import turbo_hf
from turbo_hf import TurboCache, TurboConfig

CONFIG = TurboConfig(bits=16, attention="fp16", block_size=32)
SECONDS = 300.0
"""A model that takes longer is ended."""
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
    """A row for each config of these families, and each multimodal class, each made in a process of its own, which may
    crash."""
    jobs = [(family, variant) for family in names for variant in ("", *VARIANTS.get(family, {}))]
    forked = multiprocessing.get_context("fork")
    for family, variant in [*jobs, *((family, None) for family in multimodal)]:
        ours, theirs = forked.Pipe(duplex=False)
        process = forked.Process(target=_send, args=(theirs, family, variant))
        process.start()
        theirs.close()
        row = Row(family, variant or "", outcome=WRONG, sentence=f"no result within {SECONDS:g} s, or a crash")
        with contextlib.suppress(EOFError):
            row = ours.recv() if ours.poll(SECONDS) else row
        process.kill()
        process.join()
        yield row


def _send(pipe: Any, family: str, variant: str | None) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    pipe.send(examine_multimodal(family) if variant is None else examine(family, variant))


def page(rows: list[Row], left_out: dict[str, list[str]], multimodal: list[Row]) -> str:
    """docs/models.md."""
    by = {outcome: [row for row in rows if row.outcome == outcome] for outcome in (WORKS, REFUSED, NOT_TRIED, WRONG)}
    families_of = {outcome: len({row.family for row in found}) for outcome, found in by.items()}
    parts = [
        INTRODUCTION.format(version=transformers.__version__, torch=torch.__version__.split("+")[0], **_words(by)),
        f"## Works: {families_of[WORKS]} families\n",
        _table(("family", "layers compressed", *COLUMNS, "notes"), [working(row) for row in by[WORKS]]),
        f"## Refused: {families_of[REFUSED]} families\n",
        REFUSED_WORDS,
        _table(("family", "the sentence"), [refused(row) for row in by[REFUSED]]),
    ]
    for outcome, title in ((NOT_TRIED, "Not tried"), (WRONG, "Wrong")):
        if by[outcome]:
            parts += [f"## {title}\n", _table(("family", "why"), [refused(row) for row in by[outcome]])]
    left = [_listed(f"- {reason}: ", names, "  ") for reason, names in left_out.items()]
    parts += ["## Left out\n", *left, "", *multimodal_section(multimodal)]
    return "\n".join(parts)


def multimodal_section(rows: list[Row]) -> list[str]:
    """Its part about multimodal classes."""
    by = {outcome: [row for row in rows if row.outcome == outcome] for outcome in (WORKS, REFUSED, NOT_TRIED, WRONG)}
    shown = [row for row in by[WORKS] if row.medium != "text alone"]
    count = {"tried": len(rows), "works": len(by[WORKS]), "shown": len(shown), "text": len(by[WORKS]) - len(shown)}
    parts = [
        MULTIMODAL.format(**count, refused=len(by[REFUSED]), rest=len(by[NOT_TRIED])),
        _table(("class", "shown", "layers compressed", "its tokens"), [multimodal_cells(row) for row in by[WORKS]]),
        "Refused:\n",
        _table(("class", "the sentence"), [multimodal_cells(row) for row in by[REFUSED]]),
    ]
    if by[WRONG]:
        parts += ["## Wrong\n", _table(("class", "why"), [multimodal_cells(row) for row in by[WRONG]])]
    names = [row.model for row in by[NOT_TRIED]]
    return [*parts, _listed("Not tried, as no tiny config or no input was found by rule: ", names), ""]


def multimodal_cells(row: Row) -> list[str]:
    """Cells of a multimodal class."""
    name = f"`{row.model}`"
    return [name, row.medium, row.layers, row.modes["batch"]] if row.outcome == WORKS else [name, row.sentence]


def _listed(begin: str, names: Iterable[str], indent: str = "") -> str:
    text = f"{begin}{', '.join(f'`{name}`' for name in names)}."
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def working(row: Row) -> list[str]:
    """Cells of a model that works."""
    return [f"`{row.family}`{', ' * bool(row.variant)}{row.variant}", row.layers, *_modes(row), "; ".join(row.notes)]


def refused(row: Row) -> list[str]:
    """Cells of a model that does not."""
    first = f"`{row.family}`{', ' * bool(row.variant)}{row.variant}"
    served = row.outcome == REFUSED and len(row.modes) == len(COLUMNS)
    if not served or any(what.startswith("refused") for what in row.modes.values()):
        return [first, row.sentence]
    return [first, f'{row.sentence} With `strict="warn"` it works: {row.layers}.']


def _modes(row: Row) -> list[str]:
    return [row.modes[name] for name in COLUMNS]


def _words(by: dict[str, list[Row]]) -> dict[str, Any]:
    return {"tried": sum(len(found) for found in by.values())}


def _table(head: tuple[str, ...], cells: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([text.replace("|", "\\|") for text in row] for row in cells)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


INTRODUCTION = """# Models

Every decoder-only family of Transformers {version}, tried with `turbo_hf.patch` on tiny random models ({tried} configs,
torch {torch}, on a CPU). This page is written by a script. To make it anew, or to try some families with the versions
that you have:

```bash
python tests/support/families_table.py --out docs/models.md
python tests/support/families_table.py --only llama,gemma3_text
```

It says whether a family's attention and cache are served rightly, not how much accuracy a trained model keeps at few
bits: for that, evaluate (`turbo-hf eval`). "yes" means that the patched model has chosen the unpatched one's tokens,
with unquantized pages (`TurboConfig(bits=16, attention="fp16")`, which keep float16), and that its logits were no
further off than about what rounding the unpatched model's own cache to float16 changes. Where that rounding
alone chooses a token, other prompts are tried; "but for ties": with each of these, some token was another one, where
two were as close as that. "Unpatched" says what the model does without turbo_hf. The columns:

- layers compressed: of how many; the others stay in full precision, for the reason given.
- batch: three prompts of different length, padded at the left.
- beams: beam search over that batch.
- chunks: the same prompts with `prefill_chunk_size`.
- second turn: `generate` goes on with the cache of a first answer and more tokens.
- un-patch: after `remove()` logits are bit-identical, and all attributes are the same objects as before.

Continuous batching has no column: it serves the families all of whose layers are compressed, with heads of one number
and size, those of latent attention (`axk1`, `deepseek_v2`, `deepseek_v3`, `glm4_moe_lite`, `longcat_flash`, `minicpm3`,
`youtu`) included; `report()` says so, and [limits.md](limits.md) why others are refused.
"""

MULTIMODAL = """## Multimodal classes

Of the {tried} classes of `AutoModelForMultimodalLM`, {works} give the unpatched tokens: {shown} in a row of text with
an image or a sound, which changes their logits, {text} with text alone. {refused} are refused, and {rest} were not
tried. The patch is on the language model alone. Tokens and logits were compared as above, of a single row.
"""

REFUSED_WORDS = """`patch` raises `turbo_hf.Unsupported` with this sentence, or `generate` does.
"""


def main(given: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Tries every decoder-only family of Transformers, as tiny models.")
    parser.add_argument("--out", type=Path, help="write the page to this file; without it, to the screen")
    parser.add_argument("--only", help="names of families, separated by commas")
    arguments = parser.parse_args(given)
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
    text = page(rows[: -len(multimodal) or None], left_out, rows[len(rows) - len(multimodal) :])
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)
    else:
        sys.stdout.write(text)
    return int(any(row.outcome == WRONG for row in rows))


if __name__ == "__main__":
    sys.exit(main())
