"""`calibrate()`: the run itself, one group of layers at a time."""

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from transformers import PreTrainedModel

from turbo_hf.calibration.artifacts import FILE, NO_INDEX, Calibration, LayerCalibration, fingerprint
from turbo_hf.calibration.capture import Samples, Seen, capturing, check_finite, probe, run_window
from turbo_hf.calibration.checkpoint import Checkpoint, checkpoint_of, other_tokenizer, own_tokenizer
from turbo_hf.calibration.heads import HeadPriorities
from turbo_hf.calibration.index import assign, choose_clusters, evaluate, k_means, sample_keys, train
from turbo_hf.calibration.settings import Settings, resolve_settings
from turbo_hf.calibration.texts import token_windows
from turbo_hf.calibration.widths import Widths
from turbo_hf.errors import warn
from turbo_hf.models.model_layers import require_model
from turbo_hf.patches.generic import is_latent
from turbo_hf.patches.layers import attention_layers
from turbo_hf.ranks import ranks_of

Progress = Callable[[str, float], None]
"""Called with a description of the current work, and the share of all work done since the last call."""


P = ParamSpec("P")
R = TypeVar("R")


def on_cpu_by_default(run: Callable[P, R]) -> Callable[P, R]:
    """Seeded numbers, and tensors made without a device, are on the CPU, whatever `torch.set_default_device` says."""

    @functools.wraps(run)
    def runs(*args: P.args, **kwargs: P.kwargs) -> R:
        elsewhere = torch.get_default_device().type != "cpu"
        with torch.device("cpu") if elsewhere else nullcontext():
            return run(*args, **kwargs)

    return runs


class Enough(Exception):
    """Ends a pass after the last layer that needs it."""


class Layers(NamedTuple):
    """Layers that are captured and trained together.

    layers: their numbers.
    shape: (KV heads, query heads per KV head, head dim).
    indexed: whether an index for sparse decoding is made for them.
    """

    layers: tuple[int, ...]
    shape: tuple[int, int, int]
    indexed: bool


class CalibrationPlan(NamedTuple):
    """What a run will do.

    settings: those of the run.
    groups: layers in the order in which they are calibrated.
    notes: by layer, why it gets less than others.
    layers: number of the model's layers.
    """

    settings: Settings
    groups: tuple[Layers, ...]
    notes: dict[int, str]
    layers: int


def make_plan(model: PreTrainedModel, settings: str | Settings = "fast") -> CalibrationPlan:
    """Probe the model and group its layers.

    Raises:
        ValueError: unknown or unsuitable settings, a model whose attention cannot be captured, or one in training mode.
        TypeError: not a Transformers model.
    """
    require_model(model)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; only decoder-only models can be calibrated.")
    if model.training:
        raise ValueError("the model is in training mode, in which dropout changes what it sees. Call model.eval().")
    text = model.config.get_text_config(decoder=True)
    chosen = resolve_settings(settings, getattr(text, "max_position_embeddings", None))
    alike: defaultdict[tuple[bool, tuple[int, int, int]], list[int]] = defaultdict(list)
    all_sources, notes = attention_layers(model), {}
    if any(source.module is not None and is_latent(source.module) for source in all_sources):
        raise ValueError(
            f"{type(model).__name__} has latent attention (MLA), with one latent for all heads: there are no heads to "
            "rank, and no keys to choose. Patch it without a calibration."
        )
    if all(source.reason for source in all_sources):
        why = all_sources[0].reason if all_sources else "it has no attention layer"
        raise ValueError(f"no layer of {type(model).__name__} can be calibrated: {why}.")
    probed = probe(model)
    for source in all_sources:
        if source.index not in probed:
            notes[source.index] = f"not calibrated: {source.reason or 'it was not called'}"
            continue
        shape, why_no_keys = probed[source.index]
        reason = "it has a sliding window" if source.window else why_no_keys
        if chosen.index and reason is not None:
            notes[source.index] = NO_INDEX + reason
        alike[chosen.index and reason is None, shape].append(source.index)
    if not probed:
        raise ValueError(f"no layer of {type(model).__name__} can be calibrated: its attention was not called.")
    groups: list[Layers] = []
    for (indexed, shape), layers in sorted(alike.items(), key=lambda each: each[0][0]):
        size = chosen.layers_at_once if indexed else len(layers)
        groups += [Layers(tuple(layers[at : at + size]), shape, indexed) for at in range(0, len(layers), size)]
    return CalibrationPlan(chosen, tuple(groups), notes, len(all_sources))


@on_cpu_by_default
def calibrate(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: str | Path | Iterable[str],
    *,
    settings: str | Settings = "fast",
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Calibration:
    """Run a model over texts and learn from its keys, values and queries. The model is not changed.

    It ranks the KV heads of every layer for mixed precision (TurboAttention eq. 11, 12), which `turbo_hf.patch` uses,
    and makes the index for sparse decoding (SAAP sec. 4): centroids of keys and query classifiers, evaluated on
    held-out text. The same seed gives the same result on the same machine. Samples of a model on a GPU are held in
    pinned host memory, which the process keeps if torch has no `torch.accelerator.empty_host_cache`.

    Args:
        model: a loaded decoder-only Transformers model, not patched.
        tokenizer: the model's tokenizer.
        texts: a .txt file, a folder of them, or strings; preferably long texts, such as books.
        settings: "fast", "full", or `turbo_hf.calibration.settings.Settings`.
        out: where to write the result; None: nowhere.
        overwrite: replace the calibration in `out` once this one is done; if False, the presence of one is an error.
            Widths that are there (`turbo-hf calibrate --budget`) are kept, if they are of this model.
        progress: called with a description and the share of all work done since the last call.

    Returns:
        Calibration, with `save_pretrained`, `push_to_hub` and quality figures.

    Raises:
        ValueError: unsuitable settings; texts too short for the long-range filter or for that many clusters; NaN or Inf
            in the model; a model in training mode; a calibration in `out` without `overwrite`.
        OSError: `out` cannot be written.
        TypeError: not a Transformers model.
    """
    ranks = ranks_of(model)
    folder = Path(out) if out is not None and ranks.rank == 0 else None
    plan = make_plan(model, settings)
    chosen = plan.settings
    with ranks.together():
        if folder is not None:
            refuse_folder(folder, overwrite)
            # what cannot be written is told before the run
            folder.mkdir(parents=True, exist_ok=True)
        checkpoint = checkpoint_of(model)
        windows = read_windows(model, tokenizer, texts, chosen, checkpoint)
        if any(group.indexed for group in plan.groups):
            _clusters(chosen, len(windows))
    settings_dict = asdict(chosen) | {"texts_sha256": hashlib.sha256(windows.numpy().tobytes()).hexdigest()}
    widths = None if out is None else _widths_in(Path(out), model)
    ranks.require_same({"settings": str(settings_dict), "widths": str(widths)})
    done: dict[int, LayerCalibration] = {}
    # in passes over a window: training and evaluation cost as much as many
    indexed = sum(group.indexed for group in plan.groups)
    share = 1 / (len(windows) * (len(plan.groups) + indexed) + indexed * chosen.steps / 4)
    for group in plan.groups:

        def step(work: float, word: str = f"layers {group.layers[0]} to {group.layers[-1]}") -> None:
            if progress is not None:
                progress(word, work * share)

        done |= {layer.index: layer for layer in _calibrate_group(model, group, plan, windows, step)}
    release = getattr(torch.accelerator, "empty_host_cache", None)
    if model.device.type == "cuda" and release is not None:
        # otherwise pinned memory would be kept until the process ends
        release()
    rest = {
        index: LayerCalibration(index, {}, note=plan.notes[index]) for index in range(plan.layers) if index not in done
    }
    layers = tuple(layer for _, layer in sorted((done | rest).items()))
    found = Calibration(fingerprint(model, checkpoint), settings_dict, layers, windows.numel(), widths)
    with ranks.together():
        if folder is not None:
            found.save_pretrained(folder)
    return found


def _widths_in(folder: Path, model: PreTrainedModel) -> Widths | None:
    """The widths in a folder whose calibration will be replaced; None: there are none of this model."""
    try:
        found = Calibration.from_pretrained(folder) if (folder / FILE).exists() else None
    except (OSError, ValueError):
        return None
    return None if found is None or found.mismatch(model) is not None else found.widths


def refuse_folder(out: Path, overwrite: bool) -> None:
    """ValueError: a run must not write its result there."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a folder, or the name of a new one; {str(out)!r} is a file.")
    if (out / FILE).exists() and not overwrite:
        raise ValueError(
            f"out: {str(out)!r} holds a calibration already. Name another folder, or pass overwrite=True "
            "(--overwrite) to replace it once the new one is done."
        )


def read_windows(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: str | Path | Iterable[str],
    chosen: Settings,
    checkpoint: Checkpoint,
) -> torch.Tensor:
    """Windows of tokens: errors are reported here, before passes that take hours.

    Raises:
        ValueError: as `calibrate`.
    """
    if not callable(tokenizer) or not hasattr(tokenizer, "get_vocab"):
        raise ValueError(f"tokenizer must be the model's own, as of AutoTokenizer; got {type(tokenizer).__name__}.")
    own = own_tokenizer(checkpoint, warn)
    wrong = None if own is None else other_tokenizer(tokenizer, own)
    if wrong is not None:
        raise ValueError(f"the tokenizer is not the model's own: {wrong}.")
    windows = token_windows(texts, tokenizer, chosen.window, chosen.windows)
    if int(windows.max()) >= model.get_input_embeddings().num_embeddings:  # type: ignore[operator]
        raise ValueError("the tokenizer has tokens that the model does not know: it belongs to another model.")
    return windows


def _calibrate_group(
    model: PreTrainedModel,
    group: Layers,
    plan: CalibrationPlan,
    windows: torch.Tensor,
    step: Callable[[float], None],
) -> tuple[LayerCalibration, ...]:
    settings = plan.settings
    priorities = {index: HeadPriorities() for index in group.layers}
    samples: dict[int, Samples] = {}
    current, left = 0, set(group.layers)

    def receive(seen: Seen) -> None:
        source = seen.source
        if source.index not in priorities:
            return
        check_finite(seen)
        priorities[source.index].add(seen.key, seen.value)
        if group.indexed:
            held = samples.setdefault(source.index, Samples(seen.scaling, seen.softcap, seen.key.device))
            held.add(seen, settings, current)
        left.discard(source.index)
        if not left:
            raise Enough

    with capturing(model, receive):
        for current, ids in enumerate(windows):  # noqa: B007 - receive reads it
            left |= set(group.layers)
            with suppress(Enough):
                run_window(model, ids[None])
            step(1)
    scores = {index: priorities[index].scores() for index in group.layers}
    made = (LayerCalibration(i, scores[i], note=plan.notes.get(i, "")) for i in group.layers)
    with ranks_of(model).together() if group.indexed else nullcontext():
        return tuple(_index(group, settings, samples, scores, len(windows), step) if group.indexed else made)


HARDLY_VARY = f"{NO_INDEX}its queries hardly vary around a large mean, and the query classifier does not fit float16"


def _index(
    group: Layers,
    settings: Settings,
    samples: dict[int, Samples],
    scores: dict[int, dict[str, torch.Tensor]],
    windows: int,
    step: Callable[[float], None],
) -> Iterator[LayerCalibration]:
    """Centroids, classifiers and their quality for a group of layers of the same shape."""
    learned = _learned(windows)
    heads = group.shape[0]
    layers = [samples[index] for index in group.layers]
    device = layers[0].device
    clusters = _clusters(settings, windows)
    each, rotated = (
        list(_centroids(keys, clusters, settings, group.layers[0], device).split(heads))
        for keys in ([layer.pre_rotary_keys[:learned] for layer in layers], [layer.keys[:learned] for layer in layers])
    )
    buckets = [
        [assign(k.to(device), own) for k in layer.pre_rotary_keys] for layer, own in zip(layers, each, strict=True)
    ]
    classifier = train(layers, buckets, each, learned, settings, lambda: step(0.25))
    for at, (index, layer) in enumerate(zip(group.layers, layers, strict=True)):
        stored = {name: x[at * heads : (at + 1) * heads].half() for name, x in classifier.items()}
        if not all(bool(x.isfinite().all()) for x in stored.values()):
            step(windows / len(layers))
            yield LayerCalibration(index, scores[index], note=HARDLY_VARY)
            continue
        own, turned, held_out = each[at].half(), rotated[at].half(), range(learned, windows)
        quality = evaluate(layer, buckets[at], own, turned, stored, held_out, settings.local, settings.seed)
        silent = [head for head, count in enumerate(quality["queries"]) if not count]
        note = f"no long-range query held out for heads {', '.join(map(str, silent))}" if silent else ""
        step(windows / len(layers))
        yield LayerCalibration(index, scores[index], own, stored, note, quality, turned)


def _learned(windows: int) -> int:
    """Number of windows to learn from; the others are for evaluation."""
    return windows - max(1, windows // 5)


def _clusters(settings: Settings, windows: int) -> int:
    """Number of centroids per KV head. ValueError: too few keys for them."""
    # the sink is always read, and has no bucket to find
    return choose_clusters(settings.clusters, _learned(windows) * (settings.window - 1))


def _centroids(
    layers: list[list[torch.Tensor]], clusters: int, settings: Settings, first: int, device: torch.device
) -> torch.Tensor:
    """Centroids [layers x Hkv, C, D] of the keys [Hkv, L, D] of each layer's windows, except the first token."""
    seeded = torch.Generator().manual_seed(settings.seed + first)
    size = layers[0][0].shape[1] - 1
    looked_at = sample_keys(size * len(layers[0]), clusters, seeded)
    parts = [looked_at[looked_at // size == number] % size + 1 for number in range(len(layers[0]))]
    keys = [
        torch.cat([k.to(device, non_blocking=True)[:, at.to(device)] for k, at in zip(windows, parts, strict=True)], 1)
        for windows in layers
    ]
    return k_means(torch.cat(keys), clusters, settings.iterations, seeded)
