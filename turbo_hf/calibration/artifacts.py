"""`Calibration`: the result of a calibration run, and the file that stores it."""

import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import HfApi
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from turbo_hf.cache.saved_files import Kind, read, signed, write
from turbo_hf.calibration.checkpoint import Checkpoint, names_a_folder
from turbo_hf.calibration.heads import head_order
from turbo_hf.calibration.widths import WRITTEN as WIDTHS
from turbo_hf.calibration.widths import Widths, widths_from
from turbo_hf.config.expected import FINITE, Each, OneOf, Stored, Whole, require
from turbo_hf.config.turbo_config import HEAD_METRICS, MOST_BUCKETS
from turbo_hf.layout import CLASSIFIER
from turbo_hf.models.model_layers import shape_field
from turbo_hf.ops.maths import checksum

FILE = "turbo_calibration.safetensors"
AGAIN = " Calibrate again, or fetch it anew."
KIND = Kind("calibration", FILE, 4, AGAIN)
NO_INDEX = "no index: "
"""Start of the note of a layer that has head priorities alone; the reason follows."""
SINGLE = ("centroids", "rotated_centroids")
"""Tensors of a layer; each may be missing."""
SHAPE_FIELDS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True, slots=True, eq=False)
class LayerCalibration:
    """One layer's part of a calibration.

    index: the layer's number.
    scores: float32 [Hkv] for each head metric; empty if nothing could be captured.
    centroids: [Hkv, C, D], of unit length; None without an index.
    classifier: the query classifier for `index.classify`: weight_1 [Hkv, D, hidden], bias_1 [Hkv, hidden],
        weight_2 [Hkv, hidden, C], bias_2 [Hkv, C]; empty without an index.
    note: why parts of it are missing; "" if none are.
    quality: the figures of `index.evaluate`, as JSON.
    rotated_centroids: like centroids, but of keys after rotary embedding, for comparison.
    """

    index: int
    scores: Mapping[str, torch.Tensor]
    centroids: torch.Tensor | None = None
    classifier: Mapping[str, torch.Tensor] = field(default_factory=dict)
    note: str = ""
    quality: Mapping[str, Any] = field(default_factory=dict)
    rotated_centroids: torch.Tensor | None = None

    def of_heads(self, heads: range) -> "LayerCalibration":
        """What it says of these KV heads alone, as for a layer that has no others."""
        own = slice(heads.start, heads.stop)
        single = {name: x[own] for name in SINGLE if (x := getattr(self, name)) is not None}
        return replace(
            self,
            scores={metric: x[own] for metric, x in self.scores.items()},
            classifier={name: x[own] for name, x in self.classifier.items()},
            **single,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the layer stores, by name."""
        parts = {f"scores.{metric}": x for metric, x in self.scores.items()} | dict(self.classifier)
        parts |= {name: x for name in SINGLE if (x := getattr(self, name)) is not None}
        return {f"layers.{self.index}.{name}": x.contiguous().cpu() for name, x in parts.items()}

    def facts(self) -> dict[str, Any]:
        """What the layer says, for JSON."""
        return {"index": self.index, "note": self.note, "quality": dict(self.quality)}


def layer_from(facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> LayerCalibration:
    """The layer that `LayerCalibration.facts` and `tensors` describe."""
    index = facts["index"]
    start = f"layers.{index}."
    own = {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}
    scores = {metric: own[f"scores.{metric}"] for metric in HEAD_METRICS if f"scores.{metric}" in own}
    classifier = {name: own[name] for name in CLASSIFIER if name in own}
    single = {name: own.get(name) for name in SINGLE}
    return LayerCalibration(
        index, scores, classifier=classifier, note=facts["note"], quality=facts["quality"], **single
    )


def fingerprint(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, Any]:
    """Identifies a model without reading weights: type, shapes and vocabulary."""
    name = checkpoint.name
    return _shapes(model) | {"model": Path(name).name if os.path.isdir(name) else name}


def _shapes(model: PreTrainedModel) -> dict[str, Any]:
    """The part of a fingerprint that must agree."""
    text = model.config.get_text_config(decoder=True)
    found: dict[str, Any] = {"model_type": text.model_type, "vocab_size": text.vocab_size}
    return found | {field_name: shape_field(text, field_name) for field_name in SHAPE_FIELDS}


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """What `turbo_hf.calibrate` found for a model. `turbo_hf.patch(model, config, calibration=...)` uses it.

    fingerprint: of the model it was made for.
    settings: those of the run.
    layers: one for each layer of the model.
    tokens: number of tokens that were run.
    widths: those of keys and values of each layer, for `TurboConfig.layer_bits="calibrated"`; None: it chooses none.
    source: the folder or repository it was read from; "" if made in this process.
    """

    fingerprint: Mapping[str, Any]
    settings: Mapping[str, Any]
    layers: tuple[LayerCalibration, ...]
    tokens: int
    widths: Widths | None = None
    source: str = ""

    def head_orders(self, metric: str) -> dict[int, tuple[int, ...]]:
        """KV heads of each calibrated layer, from the one that needs its bits most to the one that needs them least.

        metric: "priority", "entropy", "min_max" or "variation" (TurboAttention eq. 11, 12); another is a ValueError.
        """
        if metric not in HEAD_METRICS:
            raise ValueError(f"metric must be one of {', '.join(HEAD_METRICS)}; got {metric!r}.")
        return {layer.index: head_order(layer.scores[metric]) for layer in self.layers if layer.scores}

    def mismatch(self, model: PreTrainedModel) -> str | None:
        """Why this calibration does not fit `model`; None: it fits, as far as can be determined.

        A fine-tuned model of the same shape fits: its heads are much like those of its base model.
        """
        count = self.fingerprint.get("num_hidden_layers")
        if count is not None and [layer.index for layer in self.layers] != list(range(count)):
            return f"it holds {len(self.layers)} of the {count} layers of its model, or not in order"
        for name, value in _shapes(model).items():
            made = self.fingerprint.get(name)
            if made != value:
                return f"it was made for a model with {name} {made!r}, and this one has {value!r}"
        return None

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `turbo_calibration.safetensors` into `folder`, which may hold other files.

        Raises:
            ValueError: `folder` is a file.
            OSError: it cannot be created or written; the message names the file.
        """
        write(Path(folder), KIND, self._facts(), self._tensors())

    def digest(self) -> str:
        """Identifies a calibration: the start of a SHA-256 of what its file holds."""
        return str(signed(KIND, self._facts(), self._tensors())["sha256"])[:16]

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: x for layer in self.layers for name, x in layer.tensors().items()}

    def _facts(self) -> dict[str, Any]:
        return {
            "fingerprint": dict(self.fingerprint),
            "settings": dict(self.settings),
            "tokens": self.tokens,
            "layers": [layer.facts() for layer in self.layers],
            "widths": None if self.widths is None else self.widths.facts(),
        }

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload the file to a Hub repository, created if needed; returns the URL of the commit."""
        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            words = "Calibration for turbo_hf"
            done = api.upload_file(
                path_or_fileobj=Path(folder) / FILE, path_in_repo=FILE, repo_id=repo_id, commit_message=words
            )
        return str(done.commit_url)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        token: str | None = None,
        local_files_only: bool = False,
    ) -> "Calibration":
        """Read a calibration from a folder or a Hub repository.

        Raises:
            ValueError: it is damaged, or has another schema.
            OSError: there is none.
        """
        folder = Path(name)
        if folder.is_file():
            raise OSError(f"a calibration is a folder, and {str(name)!r} is a file. Name {str(folder.parent)!r}.")
        if not folder.is_dir():
            if names_a_folder(str(name)):
                raise OSError(f"there is no calibration in {str(name)!r}: there is no such folder.")
            options = {"revision": revision, "token": token, "local_files_only": local_files_only}
            try:
                folder = Path(str(cached_file(str(name), FILE, **options))).parent
            except OSError as error:
                raise OSError(f"there is no calibration in {str(name)!r}, or it cannot be reached: {error}") from error
        facts, tensors = read(folder, KIND, str(name))
        try:
            return _checked(facts, tensors, str(name))
        except ValueError as error:
            raise ValueError(f"the calibration saved in {str(name)!r} is damaged: {error}.{AGAIN}") from error


def _checked(facts: dict[str, Any], mapped: Mapping[str, torch.Tensor], source: str) -> Calibration:
    """The calibration that a file holds. ValueError: it holds something else."""
    require(facts, WRITTEN, "")
    if facts["widths"] is not None:
        require(facts["widths"], WIDTHS, "widths")
    fingerprint, settings = facts["fingerprint"], facts["settings"]
    require(fingerprint, {**dict.fromkeys(fingerprint, object), **_known(fingerprint, FINGERPRINT)}, "fingerprint")
    require(settings, {**dict.fromkeys(settings, object), **_known(settings, SETTINGS)}, "settings")
    # copies: others may write the file
    tensors = {name: x.clone() for name, x in mapped.items()}
    require({name: int(checksum(x)) for name, x in tensors.items()}, facts["sums"], "sums")
    require(tensors, _parts(facts["layers"], tensors, fingerprint), "")
    widths = None if facts["widths"] is None else widths_from(facts["widths"])
    if widths is not None and len(widths.layers) != len(facts["layers"]):
        raise ValueError(f"it has widths of {len(widths.layers)} layers, and {len(facts['layers'])} layers")
    layers = tuple(layer_from(each, tensors) for each in facts["layers"])
    return Calibration(fingerprint, settings, layers, facts["tokens"], widths, source)


NUMBER, TEXT = Whole(1, 2**31), OneOf((str, None))
SIZE = OneOf((NUMBER, None, Each(OneOf((NUMBER, None)))))
"""A number for all layers, or a list with one for each."""
FINGERPRINT = {
    **dict.fromkeys(("model", "model_type"), TEXT),
    **dict.fromkeys((*SHAPE_FIELDS, "vocab_size"), SIZE),
    "num_hidden_layers": OneOf((Whole(1, 2**16), None)),
}
SETTINGS = {"local": OneOf((Whole(0, 2**31), None))}
"""Entries that later code reads, where they are there."""
WRITTEN = {
    **{"format": str, "schema": int, "fingerprint": dict, "settings": dict, "tokens": Whole(0, 2**63)},
    "layers": Each({"index": Whole(0, 2**16), "note": str, "quality": dict}),
    "widths": object,
    **{"sums": dict, "sha256": str},
}


def _known(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in wanted.items() if name in found}


def _parts(
    layers: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor], made_for: Mapping[str, Any]
) -> dict[str, Stored]:
    """What the tensors of these layers must be. Errors: ValueError."""
    wanted: dict[str, Stored] = {}
    numbers, count = [facts["index"] for facts in layers], made_for.get("num_hidden_layers")
    if numbers != sorted(set(numbers)) or (count is not None and numbers and numbers[-1] >= count):
        raise ValueError(f"it holds layers {reprlib.repr(numbers)}, of {count or 'any number'}")
    for n in numbers:
        start = f"layers.{n}."
        own = {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}
        wanted |= {f"{start}{name}": part for name, part in _parts_of_layer(own, made_for, n).items()}
    return wanted


def _parts_of_layer(own: Mapping[str, torch.Tensor], made_for: Mapping[str, Any], n: int) -> dict[str, Stored]:
    """What the tensors of one layer must be: those that are there, and those that belong to them."""
    sizes = [made_for.get(name) for name in ("num_key_value_heads", "head_dim")]
    heads, dim = ((size[n] if n < len(size) else None) if isinstance(size, list) else size for size in sizes)
    shapes = {name: tuple(x.shape) for name, x in own.items()}

    def size(name: str, at: int) -> int | None:
        return shapes[name][at] if len(shapes.get(name, ())) > at else None

    heads = heads or next((shape[0] for shape in shapes.values() if shape), None)
    dim, clusters, hidden = dim or size("centroids", 2), size("centroids", 1), size("bias_1", 1)
    if clusters is not None and clusters > MOST_BUCKETS:
        raise ValueError(f"layer {n} has {clusters} centroids per head, and at most {MOST_BUCKETS} can be used")
    scores = {f"scores.{metric}": (heads,) for metric in HEAD_METRICS}
    index = {"centroids": (heads, clusters, dim), "rotated_centroids": (heads, clusters, dim)}
    index |= {"weight_1": (heads, dim, hidden), "weight_2": (heads, hidden, clusters)}
    wanted: dict[str, Stored] = {}
    for together in (scores, {**index, "bias_1": (heads, hidden), "bias_2": (heads, clusters)}):
        if together.keys() & own.keys():
            wanted |= {name: Stored(shape, None, *FINITE) for name, shape in together.items()}
    return wanted


def find(checkpoint: Checkpoint) -> Calibration | None:
    """The calibration stored with a checkpoint; None: there is none. Errors as in `Calibration.from_pretrained`."""
    if checkpoint.file(FILE) is None:
        return None
    return Calibration.from_pretrained(checkpoint.name, revision=checkpoint.commit, local_files_only=True)
