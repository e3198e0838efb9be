"""`Calibration`: the result of a calibration run, and the two files and the card that store it."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitOperationAdd, HfApi
from safetensors import SafetensorError
from safetensors.torch import load, save
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from turbo_hf.calibration.checkpoint import Checkpoint, names_a_folder, tokenizer_hash
from turbo_hf.calibration.heads import head_order
from turbo_hf.config.turbo_config import HEAD_METRICS, MOST_BUCKETS
from turbo_hf.config.whole_files import PARTIAL, FactsFile, checked_facts, facts_hash, one_writer, write_whole
from turbo_hf.layout import CLASSIFIER
from turbo_hf.models.model_layers import shape_field
from turbo_hf.ops.store.quantize import FLOATS

SCHEMA = 2
FORMAT = "turbo_hf calibration"
FACTS, TENSORS, CARD = "turbo_calibration.json", "turbo_calibration.safetensors", "turbo_calibration.md"
LOCK, WAIT = f"{FACTS}.lock", 60.0
"""Held while the files are replaced, and how many seconds another process waits for that."""
NO_INDEX = "no index: "
"""Start of the note of a layer that has head priorities alone; the reason follows."""
SINGLE = ("centroids", "rotated_centroids", "prompt", "left_by_head")
"""Tensors of a layer, each of which may be missing."""
SHAPE_FIELDS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True, slots=True, eq=False)
class LayerCalibration:
    """One layer's part of a calibration.

    index: the layer's number.
    scores: float32 [Hkv] for each head metric; empty if nothing could be captured.
    centroids: [Hkv, C, D], of unit length; None without an index.
    classifier: the query classifier for `query_model.classify`: weight_1 [Hkv, D, hidden], bias_1 [Hkv, hidden],
        weight_2 [Hkv, hidden, C], bias_2 [Hkv, C]; empty without an index.
    note: why parts of it are missing; "" if none are.
    quality: the figures of `quality.evaluate`, as JSON.
    rotated_centroids: like centroids, but of keys after rotary embedding, for comparison.
    prompt: float32 [Hkv, G, 2], mass and peak of sparse prompts for each query head; None: not chosen.
    left_by_head: float32 [Hkv], the share that steps by means may leave; 0: everything is read. None: not chosen.
    """

    index: int
    scores: Mapping[str, torch.Tensor]
    centroids: torch.Tensor | None = None
    classifier: Mapping[str, torch.Tensor] = field(default_factory=dict)
    note: str = ""
    quality: Mapping[str, Any] = field(default_factory=dict)
    rotated_centroids: torch.Tensor | None = None
    prompt: torch.Tensor | None = None
    left_by_head: torch.Tensor | None = None

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
    index = int(facts["index"])
    start = f"layers.{index}."
    own = {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}
    scores = {metric: own[f"scores.{metric}"] for metric in HEAD_METRICS if f"scores.{metric}" in own}
    classifier = {name: own[name] for name in CLASSIFIER if name in own}
    note, quality = facts["note"], dict(facts["quality"])
    if not isinstance(note, str):
        raise TypeError(f"the note of layer {index} is {note!r}, no text")
    single = {name: own.get(name) for name in SINGLE}
    return LayerCalibration(index, scores, classifier=classifier, note=note, quality=quality, **single)


def fingerprint(model: PreTrainedModel, checkpoint: Checkpoint, tokenizer: Any = None) -> dict[str, Any]:
    """Identifies a model without reading weights: type, shapes, vocabulary, and, where known, the commit and a hash of
    the tokenizer's vocabulary."""
    name = checkpoint.name
    found = {"model": Path(name).name if os.path.isdir(name) else name, "revision": checkpoint.known_commit}
    return _shapes(model, tokenizer) | found


def _shapes(model: PreTrainedModel, tokenizer: Any) -> dict[str, Any]:
    """The part of a fingerprint that must agree."""
    text = model.config.get_text_config(decoder=True)
    found: dict[str, Any] = {"model_type": text.model_type, "vocab_size": text.vocab_size}
    found |= {field_name: shape_field(text, field_name) for field_name in SHAPE_FIELDS}
    return found | {"tokenizer": None if tokenizer is None else tokenizer_hash(tokenizer)}


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """What `turbo_hf.calibrate` found for a model. `turbo_hf.patch(model, config, calibration=...)` uses it.

    fingerprint: of the model it was made for.
    settings: those of the run.
    layers: one for each layer of the model.
    tokens: number of tokens that were run.
    source: the folder or repository it was read from; "" if made in this process.
    """

    fingerprint: Mapping[str, Any]
    settings: Mapping[str, Any]
    layers: tuple[LayerCalibration, ...]
    tokens: int
    source: str = ""

    def head_orders(self, metric: str) -> dict[int, tuple[int, ...]]:
        """KV heads of each calibrated layer, from the one that needs its bits most to the one that needs them least.

        metric: "priority", "entropy", "min_max" or "variation" (TurboAttention eq. 11, 12); another is a ValueError.
        """
        if metric not in HEAD_METRICS:
            raise ValueError(f"metric must be one of {', '.join(HEAD_METRICS)}; got {metric!r}.")
        return {layer.index: head_order(layer.scores[metric]) for layer in self.layers if layer.scores}

    def mismatch(self, model: PreTrainedModel, tokenizer: Any = None) -> str | None:
        """Why this calibration does not fit `model` (and `tokenizer`); None: it fits, as far as can be determined.

        A fine-tuned model of the same shape fits: its heads are much like those of its base model.
        """
        count = self.fingerprint.get("num_hidden_layers")
        if count is not None and [layer.index for layer in self.layers] != list(range(count)):
            return f"it holds {len(self.layers)} of the {count} layers of its model, or not in order"
        for name, value in _shapes(model, tokenizer).items():
            made = self.fingerprint.get(name)
            unknown = name == "tokenizer" and (tokenizer is None or made is None)
            if not unknown and made != value:
                return f"it was made for a model with {name} {made!r}, and this one has {value!r}"
        return None

    def other_revision(self, checkpoint: Checkpoint) -> str | None:
        """A sentence if the checkpoint's commit differs from the calibrated one; None: no difference is known."""
        made, here = self.fingerprint.get("revision"), checkpoint.commit
        if made is None or here is None or made == here:
            return None
        this = "may be of another: say which by revision=" if checkpoint.others else f"is of {here[:12]}"
        return f"the calibration was made for revision {made[:12]} of the checkpoint; this model {this}."

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `turbo_calibration.json`, `.safetensors` and a card `.md` into `folder`, which may hold other files.

        A calibration that is there is replaced as a whole: whoever reads meanwhile, or after a process that was killed
        or a disk that was full, finds the former one or this one.

        Raises:
            ValueError: `folder` is a file.
            OSError: it cannot be created or written, or another process writes there; the message names the file.
        """
        path = Path(folder)
        if path.exists() and not path.is_dir():
            raise ValueError(f"folder must be a folder, or the name of a new one; {str(folder)!r} is a file.")
        files = self._files()
        with one_writer(path, LOCK, WAIT):
            _settle(path)
            try:
                write_whole(_waiting(path, files[FACTS]), files[TENSORS])
                # from here on the new calibration counts
                write_whole(path / FACTS, files[FACTS])
            finally:
                _settle(path)
            write_whole(path / CARD, files[CARD])

    def digest(self) -> str:
        """Identifies a calibration: the start of a SHA-256 of the files that store it."""
        return hashlib.sha256(b"".join(self._files().values())).hexdigest()[:16]

    def _files(self) -> dict[str, bytes]:
        tensors = save({name: x for layer in self.layers for name, x in layer.tensors().items()})
        facts = {
            "format": FORMAT,
            "schema": SCHEMA,
            "fingerprint": dict(self.fingerprint),
            "settings": dict(self.settings),
            "tokens": self.tokens,
            "layers": [layer.facts() for layer in self.layers],
            "sha256": hashlib.sha256(tensors).hexdigest(),
        }
        facts[CALIBRATED.digest] = facts_hash(facts, CALIBRATED.digest)
        return {TENSORS: tensors, FACTS: (json.dumps(facts, indent=1) + "\n").encode(), CARD: self.card().encode()}

    def card(self) -> str:
        """What this is and how it was made, in Markdown."""
        lines = [
            f"# Calibration of {self.fingerprint.get('model') or 'a model'} for turbo_hf",
            "",
            f"Made from {self.tokens:,} tokens. `turbo_hf.patch(model, ...)` finds these files beside the checkpoint.",
            "",
            f"- `{FACTS}`: fingerprint, settings, quality",
            f"- `{TENSORS}`: head priorities, centroids, query classifiers, rules of sparse prompts and steps",
            "",
            "| layer | priorities | centroids | note |",
            "|---|---|---|---|",
        ]
        for layer in self.layers:
            scores = ", ".join(f"{x:.3g}" for x in layer.scores["priority"].tolist()) if layer.scores else "-"
            count = "-" if layer.centroids is None else str(layer.centroids.shape[1])
            lines.append(f"| {layer.index} | {scores} | {count} | {layer.note} |")
        return "\n".join(lines) + "\n"

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload the three files to a Hub repository, created if needed; returns the URL of the commit."""
        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        files = [CommitOperationAdd(name, content) for name, content in self._files().items()]
        return str(api.create_commit(repo_id, files, commit_message="Calibration for turbo_hf").commit_url)

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
        if Path(name).is_dir():
            return _read_folder(Path(name), str(name))
        if names_a_folder(str(name)):
            raise OSError(f"there is no calibration in {str(name)!r}: there is no such folder.")
        options = {"token": token, "local_files_only": local_files_only}
        parts, missing = [], "there is no calibration in"
        for part in (FACTS, TENSORS):
            try:
                path = Path(str(cached_file(str(name), part, revision=revision, **options)))
                parts.append(path.read_bytes())
            except OSError as error:
                raise OSError(f"{missing} {str(name)!r}, or it cannot be reached: {error}") from error
            # the second of the same commit, whatever is pushed meanwhile
            revision, missing = path.parent.name, f"there is no {TENSORS} beside the {FACTS} in"
        return _read(parts[0], parts[1], str(name))


def _waiting(folder: Path, facts: bytes) -> Path:
    """The tensors' file that goes with these facts, before `_settle` gives it its name."""
    wanted = ""
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        wanted = str(json.loads(facts).get("sha256"))[:16]
    return folder / f"{TENSORS}.{wanted if wanted.isalnum() else ''}{PARTIAL}"


def _settle(folder: Path) -> None:
    """Finish what a writer began, or undo it; only for the one that holds the lock."""
    facts = folder / FACTS
    if facts.is_file() and (waiting := _waiting(folder, facts.read_bytes())).is_file():
        waiting.replace(folder / TENSORS)
    for name in (FACTS, TENSORS, CARD):
        for left in folder.glob(f"{name}.*{PARTIAL}"):
            left.unlink()


def _read_folder(folder: Path, source: str) -> Calibration:
    """`Calibration.from_pretrained` of a folder, whose files another process may be replacing."""
    try:
        facts = (folder / FACTS).read_bytes()
        while True:
            try:
                return _read(facts, _read_tensors(folder, facts, source), source)
            except ValueError:
                before, facts = facts, (folder / FACTS).read_bytes()
                if facts == before:
                    raise
    except FileNotFoundError as error:
        raise OSError(f"there is no calibration in {source!r}: the folder has no {FACTS}.") from error


def _read_tensors(folder: Path, facts: bytes, source: str) -> bytes:
    # in this order: what has left the first place is in the second
    for path in (_waiting(folder, facts), folder / TENSORS):
        with contextlib.suppress(FileNotFoundError):
            return path.read_bytes()
    raise ValueError(f"the calibration in {source!r} is damaged: the folder has no {TENSORS}.{AGAIN}")


AGAIN = " Calibrate again, or fetch it anew."
CALIBRATED = FactsFile(
    FACTS,
    FORMAT,
    SCHEMA,
    digest="facts_sha256",
    remedy=AGAIN,
    other_schema=" Calibrate again, or install the version of turbo_hf that made it.",
)


def _read(facts_bytes: bytes, content: bytes, source: str) -> Calibration:
    made = f"the calibration in {source!r}"
    damaged, facts = f"{made} is damaged: ", checked_facts(facts_bytes, made, CALIBRATED)
    if hashlib.sha256(content).hexdigest() != facts.get("sha256"):
        raise ValueError(f"{damaged}{TENSORS} is not the file that {FACTS} was written with.{AGAIN}")
    try:
        tensors = load(content)
        layers = tuple(layer_from(each, tensors) for each in facts["layers"])
        found = Calibration(dict(facts["fingerprint"]), dict(facts["settings"]), layers, int(facts["tokens"]), source)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{damaged}{type(error).__name__}: {error}.{AGAIN}") from error
    for owner, name in ((found.fingerprint, "num_hidden_layers"), (found.settings, "local")):
        if not isinstance(owner.get(name), int | None):
            raise ValueError(f"{damaged}{name} is {owner[name]!r}.{AGAIN}")
    if found.settings.get("architecture", "mlp") != "mlp":
        raise ValueError(
            f"the calibration in {source!r} has a query classifier of architecture {found.settings['architecture']!r}; "
            "this version has the MLP alone. Calibrate again."
        )
    for layer in layers:
        wrong = _misfit(layer, found.fingerprint) or _wrong_rules(layer, found.fingerprint)
        if wrong is not None:
            raise ValueError(f"{damaged}layer {layer.index}: {wrong}.{AGAIN}")
        if any(not bool(torch.isfinite(x).all()) for x in layer.tensors().values()):
            raise ValueError(f"{damaged}layer {layer.index} holds NaN or Inf.{AGAIN}")
    return found


def _misfit(layer: LayerCalibration, made_for: Mapping[str, Any]) -> str | None:
    """Which of a layer's parts is missing, or has a shape that contradicts the other parts or the model."""
    # each is one number for all layers, or a list with one per layer
    sizes = (made_for.get("num_key_value_heads"), made_for.get("head_dim"))
    heads, dim = (n[layer.index] if isinstance(n, list) and layer.index < len(n) else n for n in sizes)
    for name, x in layer.tensors().items():
        part = name.partition(f"layers.{layer.index}.")[2]
        if x.dtype not in FLOATS or not x.dim():
            return f"{part} is {x.dtype} {list(x.shape)}"
        heads = heads or x.shape[0]
        if x.shape[0] != heads:
            return f"{part} is for {x.shape[0]} KV heads, and there are {heads}"
    lost = [metric for metric in HEAD_METRICS if layer.scores and metric not in layer.scores]
    if lost:
        return f"it has no scores.{lost[0]}"
    if any(scores.dim() != 1 for scores in layer.scores.values()):
        return "its scores are not one for each KV head"
    parts = {"centroids": layer.centroids, "rotated_centroids": layer.rotated_centroids, **layer.classifier}
    index = {name: list(x.shape) for name, x in parts.items() if x is not None}
    if not index:
        return None
    missing = [name for name in ("centroids", "rotated_centroids", *CLASSIFIER) if name not in index]
    if missing:
        return f"its index has no {missing[0]}"
    if len(index["centroids"]) != 3:
        return f"centroids is {index['centroids']}"
    dim, clusters, hidden = dim or index["centroids"][-1], index["centroids"][1], index["bias_1"][-1]
    if clusters > MOST_BUCKETS:
        return f"it has {clusters} centroids per head, and at most {MOST_BUCKETS} can be used"
    wanted = {"centroids": [heads, clusters, dim], "rotated_centroids": [heads, clusters, dim]}
    wanted |= {"weight_1": [heads, dim, hidden], "bias_1": [heads, hidden]}
    wanted |= {"weight_2": [heads, hidden, clusters], "bias_2": [heads, clusters]}
    for part, shape in index.items():
        if shape != wanted[part]:
            return f"{part} is {shape}, and should be {wanted[part]}"
    return None


def _wrong_rules(layer: LayerCalibration, made_for: Mapping[str, Any]) -> str | None:
    """Which of a layer's rules has another shape than its heads, or holds no shares."""
    prompt, left_by_head = layer.prompt, layer.left_by_head
    if prompt is not None and (
        prompt.dim() != 3 or prompt.shape[2] != 2 or not bool(((prompt > 0) & (prompt <= 1)).all())
    ):
        return f"prompt is {list(prompt.shape)}, or holds no shares; it should be [KV heads, query heads of each, 2]"
    heads = made_for.get("num_attention_heads")
    if prompt is not None and isinstance(heads, int) and prompt.shape[0] * prompt.shape[1] != heads:
        return f"prompt is for {prompt.shape[0] * prompt.shape[1]} query heads, and there are {heads}"
    if left_by_head is not None and (
        left_by_head.dim() != 1 or not bool(((left_by_head >= 0) & (left_by_head < 1)).all())
    ):
        return f"left_by_head is {list(left_by_head.shape)}, or holds no shares; it should be one for each KV head"
    return None


def find(checkpoint: Checkpoint) -> Calibration | None:
    """The calibration stored with a checkpoint; None: there is none. Errors as in `Calibration.from_pretrained`."""
    if checkpoint.file(FACTS) is None:
        return None
    return Calibration.from_pretrained(checkpoint.name, revision=checkpoint.commit, local_files_only=True)
