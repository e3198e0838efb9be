"""What the keys and the values of each layer cost at each width, by the model's own measure, and the widths that lose
least within a budget: `turbo-hf calibrate --budget`."""

import copy
import hashlib
import math
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from turbo_hf.calibration.artifacts import FILE, Calibration, LayerCalibration, fingerprint
from turbo_hf.calibration.checkpoint import checkpoint_of
from turbo_hf.calibration.run import on_cpu_by_default, read_windows, refuse_folder
from turbo_hf.calibration.settings import Settings, resolve_settings
from turbo_hf.calibration.widths import ChosenWidths, Widths, choices
from turbo_hf.config.turbo_config import BY_CALIBRATION, TurboConfig, resolve_config
from turbo_hf.errors import Strict
from turbo_hf.eval.fidelity import Case, Fidelity, measure
from turbo_hf.eval.methods import Method
from turbo_hf.layout import BITS, BLOCK_SIZES, page_bytes
from turbo_hf.models.model_layers import module_head_dim, require_model
from turbo_hf.models.versions import CACHE
from turbo_hf.ops.host_device import input_device
from turbo_hf.patches.layers import BESIDES, LEFT_ALONE, attention_layers
from turbo_hf.patching.divergence import BOUNDS, LIKE, divergences
from turbo_hf.patching.patch_model import patch
from turbo_hf.ranks import ranks_of

PROMPT, TAIL, COUNT = 512, 64, 8
"""Tokens of a text that are rounded, a multiple of every block size; tokens after them, whose distributions are
compared; texts, of which a quarter is held out."""

SAMPLES = 32
"""Draws of next tokens per text: with six texts a cost is known to a tenth."""

ROUNDS = 5
"""Choices that are read on held-out texts until one is like 16 bit there."""
INSTEAD = "Name a budget in bytes, or keep layers at 16 bit (TurboConfig.dense_layers)."

BUDGET = re.compile(r"(\d+(?:\.\d+)?)( ?bits?)?")


class Part(NamedTuple):
    """Keys or values of a layer.

    Args:
        layer: its number. side: 0: keys, 1: values.
        costs: estimated mean KL to 16 bit by width, in nats, beyond that of 8 bit.
        sizes: bytes of a block by width, all heads. numbers: how many it has. heads: how many.
    """

    layer: int
    side: int
    costs: dict[int, float]
    sizes: dict[int, int]
    numbers: int
    heads: int


class Measured(NamedTuple):
    """What a model's widths cost.

    Args:
        parts: of every compressed layer that has the config's bits.
        base: mean KL to 16 bit with 8 bit everywhere, read in steps.
        layers: number of the model's layers. tokens: that were run. block: tokens of a block.
    """

    parts: list[Part]
    base: float
    layers: int
    tokens: int
    block: int

    def widths(self, choice: ChosenWidths) -> Widths:
        """A choice for all layers."""
        pairs = [[8, 8] for _ in range(self.layers)]
        for part, bits in zip(self.parts, choice.widths, strict=True):
            pairs[part.layer][part.side] = bits
        bits_per_number = 8 * choice.size / sum(part.numbers for part in self.parts)
        return Widths(tuple((k, v) for k, v in pairs), bits_per_number, self.base + choice.cost, self.tokens)


def require_budget(budget: str) -> None:
    """ValueError unless it is one that `choose` takes."""
    if not isinstance(budget, str) or (budget != LIKE and not BUDGET.fullmatch(budget)):
        raise ValueError(
            f'a budget is bytes per token and KV head ("104"), bits per number ("3.25 bit"), or "{LIKE}"; got '
            f"{budget!r}."
        )


def required_settings(budget: str, count: int, tokens: int) -> Settings:
    """Those that the texts of `calibrate_widths` are cut by. ValueError: an option that it refuses for any model."""
    require_budget(budget)
    if type(tokens) is not int or tokens < 1 or tokens % max(BLOCK_SIZES):
        raise ValueError(f"tokens must be a multiple of {max(BLOCK_SIZES)}, whole pages; got {tokens!r}.")
    return Settings(window=tokens + TAIL, windows=count, index=False)


def choose(measured: Measured, budget: str, bound: float = BOUNDS[0][0]) -> Widths:
    """The widths with the least predicted KL within a budget.

    budget: bytes per token and KV head ("104"), bits per stored number ("3.25 bit"), both with sizes and ranges, on the
        mean of all layers; or "like 16 bit": the fewest bytes whose predicted KL has that verdict.
    bound: the predicted KL that is like 16 bit, in nats.

    Raises:
        ValueError: another word, or a budget that no choice keeps.
    """
    require_budget(budget)
    parts = measured.parts
    found = choices([part.costs for part in parts], [part.sizes for part in parts])
    if budget == LIKE:
        good = next((each for each in found if measured.base + each.cost <= bound), None)
        if good is None:
            raise ValueError(
                f'no widths below 8 bit were found that are "{LIKE}": that takes a predicted KL of up to {bound:.4f} '
                f"nats, and 8 bit has {measured.base:.4f}. {INSTEAD}"
            )
        return measured.widths(good)
    number, in_bits = BUDGET.fullmatch(budget).groups()  # type: ignore[union-attr] # as required above
    numbers = sum(part.numbers for part in parts)
    each_byte = measured.block * sum(part.heads for part in parts) / 2
    fitting = [each for each in found if each.size <= float(number) * (numbers / 8 if in_bits else each_byte)]
    if not fitting:
        least = found[0].size
        raise ValueError(
            f"a budget of {budget} is too small: 2 bit everywhere takes {least / each_byte:g} bytes per token and KV "
            f"head, {8 * least / numbers:.3f} bits per number."
        )
    return measured.widths(fitting[-1])


@on_cpu_by_default
@torch.inference_mode(False)
@torch.enable_grad()
def measure_widths(
    model: Any,
    windows: torch.Tensor,
    *,
    tail: int = TAIL,
    samples: int = SAMPLES,
    advance: Callable[[int], None] = lambda draws: None,
) -> Measured:
    """What rounding the keys or the values of one layer costs, for all layers at once.

    A prompt's keys and values go through the pages of a patch. To second order, the KL divergence that their error d
    makes is the mean of (g d)^2 / 2, with g the gradient of the log-probability of next tokens drawn from the model
    itself (Fisher information). So one pass over the tokens after the prompt, and a backward pass for each draw, tell
    the cost of every part at every width, however many layers there are. Large errors cost more: a pass with all keys,
    or all values, at a width says how much in all.

    Args:
        model: unpatched, in one process.
        windows: int64 [texts, tokens + tail]; tokens is a multiple of the block size.
        tail: tokens whose distributions are compared.
        samples: draws per text.
        advance: called with 1 after each draw.

    Raises:
        ValueError: a model that cannot be patched, or has latent attention, sliding windows or recurrent states.
        torch.OutOfMemoryError: the model itself does not fit.
    """
    parts, layers = _open_parts(model)
    # a copy: what was made in inference mode has no gradients
    ids, config = windows.clone().to(input_device(model)), TurboConfig(bits=8)
    prompt, rest = ids[:, :-tail], ids[:, -tail:]
    held: Any = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt, use_cache=True, **{CACHE: held})
        stored = _stored(model, held, dict.fromkeys(part.layer for part in parts))
    changed = copy.deepcopy(held)
    exact = [x.requires_grad_() for n in stored for x in (changed.layers[n].keys, changed.layers[n].values)]
    errors = [
        [(y - x).detach().float() for y in widths]
        for x, widths in zip(exact, chain.from_iterable(stored.values()), strict=True)
    ]
    log_p = _log_probabilities(model, rest, changed)
    costs, seeded = (
        torch.zeros(len(exact), len(BITS), dtype=torch.float64),
        torch.Generator(log_p.device).manual_seed(0),
    )
    for n in range(samples):
        drawn = torch.multinomial(log_p.detach().exp().flatten(0, 1), 1, generator=seeded).view(*rest.shape, 1)
        gradients = torch.autograd.grad(log_p.gather(-1, drawn).sum(), exact, retain_graph=n < samples - 1)
        for at, gradient in enumerate(gradients):
            for w, error in enumerate(errors[at]):
                change = (gradient.float() * error).sum((1, 2, 3)).double()
                costs[at, w] += change.square().mean().cpu()
        advance(1)
    costs = (costs - costs[:, :1]).clamp(min=0)
    for side, name in enumerate(("keys", "values")):
        together = []
        for w in range(len(BITS)):
            changed = copy.deepcopy(held)
            for n, both in stored.items():
                setattr(changed.layers[n], name, both[side][w])
            with torch.no_grad():
                together.append(divergences(_log_probabilities(model, rest, changed), log_p.detach()).mean())
        # in 16 bit, 8-bit pages already move a model by its own rounding. This is the scale of the costs, too
        beyond = (torch.stack(together) - together[0]).clamp(min=0).cpu()
        alone = costs[side::2].sum(0)
        costs[side::2] *= torch.where(alone > 0, beyond / alone, 1.0)
    parts = [
        part._replace(costs=dict(zip(BITS, own, strict=True))) for part, own in zip(parts, costs.tolist(), strict=True)
    ]
    case = Case(prompt.shape[1], "steps")
    (base,) = measure(model, windows, [case], [Method("int8", config)], tail=tail - 1, noise=False)
    if base.figures is None:
        raise ValueError(f"int8: {base.verdict}")
    return Measured(parts, base.figures.kl, layers, windows.numel(), config.expert.block_size)


def _open_parts(model: Any) -> tuple[list[Part], int]:
    """Keys and values of each layer whose width is open, without costs; the number of the model's layers.

    ValueError: a model that cannot be patched, or measured.
    """
    parts, block = [], TurboConfig().expert.block_size
    for bits in (8, 2):
        # the first one tells what cannot be compressed
        strict: Strict = "raise" if bits == 8 else "fallback"
        with patch(model, TurboConfig(bits=bits), calibration=None, strict=strict) as handle:
            layers = handle.report().layers
            modules = {at.index: at.module for at in attention_layers(handle._model)}
        for at in layers:
            why = "it has a sliding window, whose newest tokens stay at 8 bit at every width" if at.window else ""
            if at.reason in (LEFT_ALONE["linear_attention"], BESIDES):
                why = "it has a recurrent state, through which no gradients can be read"
            if at.latent:
                raise ValueError(
                    "latent attention (MLA) has one latent for keys and values, and one width for all layers."
                )
            if why:
                raise ValueError(
                    f"what widths cost cannot be measured on this model: layer {at.index}: {why}. Name them by hand "
                    "(TurboConfig.layer_bits), and judge them with turbo-hf fidelity."
                )
    for at in layers:
        if at.groups and not at.kept_int8:
            heads, dim = sum(count for _, count in at.groups), module_head_dim(modules[at.index]) or 0
            sizes = {bits: heads * page_bytes(dim, bits, block) // 2 for bits in BITS}
            parts += [
                Part(at.index, side, dict.fromkeys(BITS, 0.0), sizes, heads * dim * block, heads) for side in (0, 1)
            ]
    if not parts:
        raise ValueError("every layer of this model is kept at 8 bit: there is nothing to choose. Patch it without.")
    return parts, len(layers)


def _stored(model: Any, held: Any, layers: Iterable[int]) -> dict[int, list[list[torch.Tensor]]]:
    """For each of these layers, what pages of each width make of its keys, and of its values."""
    stored: dict[int, list[list[torch.Tensor]]] = {n: [[], []] for n in layers}
    for bits in BITS:
        with patch(model, TurboConfig(bits=bits), calibration=None, strict="fallback") as handle:
            pages = handle.new_cache()
        for n, both in stored.items():
            own = held.layers[n]
            pages.layers[n].update(own.keys, own.values)
            for part, x in zip(both, pages.layers[n].dequantized(own.keys.shape[2]), strict=True):
                part.append(x)
    return stored


def _log_probabilities(model: Any, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """float32 [texts, tokens, vocabulary], of the token after each one."""
    logits = model(ids, use_cache=True, **{CACHE: cache}).logits
    found: torch.Tensor = logits.float().log_softmax(-1)
    return found


@on_cpu_by_default
@torch.inference_mode(False)
@torch.enable_grad()
def calibrate_widths(
    model: Any,
    tokenizer: Any,
    budget: str,
    texts: str | Path | Iterable[str] | None = None,
    *,
    count: int = COUNT,
    tokens: int = PROMPT,
    out: str | Path | None = None,
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda samples: None,
) -> tuple[Calibration, Measured, list[Fidelity]]:
    """Measure what each width costs, choose within a budget, and read held-out texts through the choice.

    Args:
        model: loaded, not patched, in one process.
        tokenizer: the model's own.
        budget: as `choose` takes it.
        texts: as `turbo_hf.calibrate` takes them; None: four books that the package carries.
        count: texts at most, a quarter of them held out. tokens: of each that are rounded.
        out: folder for the result; None: it is not written. A calibration that is there keeps what else it holds.
        overwrite: replace widths that are there.
        advance: as in `measure_widths`.

    Returns:
        The calibration; what was measured; INT8 and the choice on the held-out texts, in steps.

    Raises:
        ValueError: as `choose`, `measure_widths` and `turbo_hf.calibrate`.
        OSError: `out` cannot be written.
    """
    require_model(model)
    if model.training:
        raise ValueError("the model is in training mode, in which dropout changes what it sees. Call model.eval().")
    if ranks_of(model):
        raise ValueError("widths are measured in one process: start it without torchrun. Every rank reads the result.")
    folder = None if out is None else Path(out)
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    settings = resolve_settings(required_settings(budget, count, tokens), positions)
    parts, number = _open_parts(model)
    if budget != LIKE:
        # too small a one is refused before the measurement
        choose(Measured(parts, 0.0, number, 0, TurboConfig().expert.block_size), budget)
    with ExitStack() as held:
        kept = None
        if folder is not None:
            kept = _kept(folder, overwrite, model)
        checkpoint = checkpoint_of(model)
        carried = held.enter_context(resources.as_file(resources.files("turbo_hf").joinpath("texts")))
        windows = read_windows(model, tokenizer, carried if texts is None else texts, settings, checkpoint)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        learned = len(windows) - max(1, len(windows) // 4)
        measured = measure_widths(model, windows[:learned], advance=advance)
        if kept is None:
            said = asdict(settings) | {"budget": budget}
            said["texts_sha256"] = hashlib.sha256(windows.numpy().tobytes()).hexdigest()
            layers = tuple(LayerCalibration(n, {}) for n in range(measured.layers))
            kept = Calibration(fingerprint(model, checkpoint), said, layers, windows[:learned].numel())
        methods = [Method("int8", TurboConfig(bits=8)), Method(BY_CALIBRATION, resolve_config(BY_CALIBRATION))]
        case = Case(tokens, "steps")
        like = bound = BOUNDS[0][0]
        for _ in range(ROUNDS):
            widths = choose(measured, budget, bound)
            found = replace(kept, widths=widths)
            rows = measure(model, windows[learned:], [case], methods, tail=TAIL - 1, noise=False, calibration=found)
            for row in rows:
                if row.figures is None or not math.isfinite(row.figures.kl):
                    raise ValueError(f"the texts held out could not be read: {row.method}: {row.verdict}.")
                held_out = row.figures.kl
            found = replace(kept, widths=replace(widths, held_out=held_out))
            if budget != LIKE or held_out <= like:
                break
            # what was predicted too small will be again
            bound = like * widths.kl / held_out
        else:
            raise ValueError(
                f'no widths below 8 bit were found that are "{LIKE}": on texts held out the last of {ROUNDS} choices '
                f"has {held_out:.4f} nats. {INSTEAD}"
            )
        if folder is not None:
            found.save_pretrained(folder)
    return found, measured, rows


def _kept(folder: Path, overwrite: bool, model: Any) -> Calibration | None:
    """The calibration of this model that the folder holds; None: it holds none. ValueError: it has widths that may not
    be replaced, or is of another model."""
    if not (folder / FILE).exists():
        refuse_folder(folder, overwrite)
        return None
    found = Calibration.from_pretrained(folder)
    wrong = found.mismatch(model)
    if wrong is not None:
        raise ValueError(f"the calibration in {str(folder)!r} does not fit this model: {wrong}. Name another folder.")
    if found.widths is not None:
        refuse_folder(folder, overwrite)
    return found
