"""The options: `SparseConfig`, `Expert`, `TurboConfig` and its presets."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

from turbo_hf.config.options import (
    SUFFIXES,
    Options,
    at_least,
    freeze_layers,
    layer_indices,
    names_a_file,
    one_of,
    read_mapping,
)
from turbo_hf.layout import BITS, BLOCK_SIZES, FIRST, MODES, UNQUANTIZED, WIDTHS, HeadGroups, Width, widths_of

HEAD_METRICS = ("priority", "entropy", "min_max", "variation")
ATTENTION_MODES = tuple(MODES)
BY_CALIBRATION: Literal["calibrated"] = "calibrated"
"""`TurboConfig.layer_bits` of widths that a calibration names, and the name of that config."""
BACKENDS = ("auto", "triton", "reference")
CALIBRATED = ("saap", "kmeans", "kmeans-rotated")
"""Selectors that choose buckets of keys, and need a calibration."""
SELECTORS = (*CALIBRATED, "window", "full")
MOST_BUCKETS = 1 << 15
"""Maximum number of buckets per KV head: a token's bucket is stored in 16 bits."""
MOST_TOKENS = 1 << 30
"""Maximum number of tokens that are always read: no row holds more, and places are counted in 32 bits."""
LARGEST_SEED = (1 << 32) - 1
"""Seeds are multiplied by constants, with layers and windows added, and torch accepts 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseConfig(Options):
    """Which cached keys a decode step attends to (SAAP): all, or some always and those of some buckets of the rest.

    Prompts, and chunks of more than 16 tokens, attend to everything. In shorter chunks each token chooses for itself,
    as if it had come alone. Layers with a sliding window are not made sparse.

    Args:
        selector: how keys are assigned to buckets, and how the buckets that a query visits are chosen. "saap": buckets
            by centroids of keys before rotary embedding, visits by the query classifier. "kmeans": visits by the inner
            product of the un-rotated query and the centroids. "kmeans-rotated": centroids of keys after rotary
            embedding. These three need a calibration. "window": the always-read tokens alone (StreamingLLM). "full":
            every key. Options are refused for selectors that do not use them, unless left at their defaults.
        probes: how many buckets a step visits for each KV head, by the sum of its query heads' scores; None: 32 (SAAP:
            l = 32). For "saap", "kmeans" and "kmeans-rotated".
        sink_tokens, window_tokens: how many of the first and of the newest tokens of a row are always read (SAAP: 1 +
            2047), from 0 and 1 to 2^30. A row of no more tokens than these is read in full.
        read_all_layers: layers whose steps read every key (SAAP: the first). They remain compressed.
    """

    selector: Literal["saap", "kmeans", "kmeans-rotated", "window", "full"] = "saap"
    probes: int | None = None
    sink_tokens: int = 1
    window_tokens: int = 2047
    read_all_layers: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        freeze_layers(self, "read_all_layers")
        one_of("selector", self.selector, SELECTORS, "SparseConfig")
        for field, least in (("sink_tokens", 0), ("window_tokens", 1)):
            at_least(field, getattr(self, field), least, "SparseConfig")
            if getattr(self, field) > MOST_TOKENS:
                raise ValueError(f"SparseConfig.{field} must be at most {MOST_TOKENS}; got {getattr(self, field)}.")
        if self.probes is not None:
            at_least("probes", self.probes, 1, "SparseConfig")
            if self.selector not in CALIBRATED:
                raise ValueError(
                    f'SparseConfig.probes has no effect with selector "{self.selector}". Leave it out, or take one of '
                    f"{', '.join(CALIBRATED)}."
                )
        layer_indices("read_all_layers", self.read_all_layers, "", "SparseConfig")

    @property
    def count(self) -> int:
        """Number of buckets visited: `probes`, 32 by default."""
        return self.probes or 32

    @property
    def index_bytes(self) -> int:
        """Bytes of the index per token and KV head: 2 where a key has a bucket."""
        return 2 if self.selector in CALIBRATED else 0

    def check_buckets(self, buckets: int) -> None:
        """ValueError if more buckets are to be visited than exist."""
        if self.count > buckets:
            came = f"got {self.probes}" if self.probes else f"it is {self.count} unless it is given"
            raise ValueError(
                f"SparseConfig.probes must be at most the {buckets} buckets of a head; {came}. Take fewer, or more "
                "buckets (a calibration with more clusters)."
            )

    def many_probes(self, buckets: int) -> str | None:
        """A sentence if steps visit half of a head's buckets or more; None: they do not."""
        if 2 * self.count < buckets:
            return None
        return (
            f"steps visit {self.count} of the {buckets} buckets of a head, and so read most keys. Take fewer probes "
            "(SparseConfig.probes), or more buckets (a calibration with more clusters)."
        )


DEFAULT_BITS = 4
"""Bits of the default preset."""

MOST_RECENT = 1024
"""The most `recent_tokens`: one tile of a decode step reads all open tokens of a head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert(Options):
    """Options of `TurboConfig` that serve papers and tests.

    Args:
        block_size: tokens per block: 32, 64 or 128.
        low_bits: bits of the lowest-priority heads, if `low_heads` is not 0: those that a calibration ranks last;
            without one, those numbered last, with a warning.
        low_heads: share of each layer's KV heads that are stored at `low_bits`, 0 to 1, rounded down (TurboAttention
            sec. 3.2, n_h / Hkv).
        head_metric: the metric that ranks the heads (TurboAttention eq. 11, 12 and the ablation): "priority",
            "entropy", "min_max" or "variation" of the channel gaps.
        sas: replace the softmax exponential by SAS (TurboAttention sec. 4).
        sas_threshold: SAS drops scores further than this below the maximum of their tile; a negative number. None: a
            default that falls with the length: -(6 + ln(N / 1024)), where N is the next power of two, at least 1024.
        backend: "triton" kernels, the "reference" in plain torch, or "auto": kernels on CUDA, the reference elsewhere.
    """

    block_size: int = 64
    low_bits: int = 2
    low_heads: float = 0.0
    head_metric: Literal["priority", "entropy", "min_max", "variation"] = "priority"
    sas: bool = False
    sas_threshold: float | None = None
    backend: Literal["auto", "triton", "reference"] = "auto"

    def __post_init__(self) -> None:
        one_of("block_size", self.block_size, BLOCK_SIZES, "Expert")
        one_of("low_bits", self.low_bits, BITS, "Expert")
        share = self.low_heads
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"Expert.low_heads must be a share from 0 to 1; got {share!r}.")
        one_of("head_metric", self.head_metric, HEAD_METRICS, "Expert")
        one_of("sas", self.sas, (True, False), "Expert")
        threshold = self.sas_threshold
        number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if threshold is not None and not (number and -80 <= threshold < 0):
            raise ValueError(
                f"Expert.sas_threshold must be None or a number from -80 to below 0 (natural log units); "
                f"got {threshold!r}."
            )
        if threshold is not None and not self.sas:
            raise ValueError(f"Expert.sas_threshold has no effect without sas=True; got {threshold!r}.")
        one_of("backend", self.backend, BACKENDS, "Expert")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurboConfig(Options):
    """How keys and values are stored, and how attention is computed on them.

    Args:
        bits: bits per stored code: 8, 4, 3 or 2 (TurboAttention sec. 3.1; 8 is stage 1 alone), or 16: the model's own
            numbers unquantized (float16 for a float32 model), in pages, read by the same kernel (LeanAttention). Such
            a layer also keeps its open tokens unquantized, and its prompt attention is not rounded.
        value_bits: bits of the values alone: 8, 4, 3 or 2, while keys have `bits`; None: both have `bits`. Not with
            bits=16. The heads at `low_bits` keep values at the smaller of both. A layer that is kept at 8 bit
            (`int8_layers`) keeps its values at 8 bit, too.
        layer_bits: bits of each layer, first to last: a number, or a pair of those of keys and of values, as in `bits`;
            or "calibrated": those of a calibration (`turbo-hf calibrate --budget`), which `patch` puts here. `bits`,
            `value_bits` and `low_heads` stay at their defaults then. None: all layers are alike. Not for latent
            attention.
        recent_tokens: newest tokens of each row that stay at 8 bit, beside a block that is not yet whole: a multiple of
            `block_size`, up to 1024. Short prompts are then stored at 8 bit as a whole. Not with bits=16 or sparse.
            None: one block in a layer that stores anything below 8 bit, where they are possible, else none.
        dense_layers: layers that are not rounded: whatever the other options say, they have pages of 16 bit, as with
            bits=16, and attention "native". A float32 model has float16 pages, which round to 11 bits.
        int8_layers: layers kept at 8 bit. "auto" finds those whose key bias alone would fill the INT8 range, where the
            family's rotary embedding is not known (else keys with large biases are balanced: `report()`), and of latent
            attention (MLA) the one in 20, at least one, whose scores 4 bit would disturb most, if that is much.
        attention: how the attention of a prompt is computed. "turbo": INT8 Q, K, P and V, one scale per block
            (TurboAttention alg. 1). "int8": the same with one K scale per token (INT-FlashAttention alg. 1). "half":
            INT8 Q and K, P and V in 16 bit. "fp8": INT8 Q and K, P and V in FP8; needs a GPU that supports it.
            "native": the model's own dtype. "auto": "turbo" where it was measured to be faster on this GPU for the
            prompt's length, else "native", as without a GPU. Decoding computes on the stored integers in every mode but
            "native", which dequantizes them.
        sparse: decode steps attend to a few percent of the keys; None: to all of them.
        compile: compile the layers of decode steps of `generate` that are captured as CUDA graphs, by inductor: all but
            attention is fused. Layers that are alike share their code. The first step waits for it, some seconds, less
            once it is on disk. Why a model cannot be compiled is a warning, with cuda_graphs=False an error. "tuned":
            inductor tunes its tiles too, which takes longer, in each process.
        cuda_graphs: replay decode steps of `generate` and of continuous batching as CUDA graphs. "auto": on a GPU, for
            the tested families, where nothing prevents it (`report()` says what does; `docs/limits.md` lists what
            runs without). True: for any family, and a step that cannot be captured is an error. False: never.
        expert: the other options.
    """

    nested: ClassVar = {"sparse": SparseConfig, "expert": Expert}

    bits: int = DEFAULT_BITS
    value_bits: int | None = None
    layer_bits: tuple[Width, ...] | Literal["calibrated"] | None = None
    recent_tokens: int | None = None
    dense_layers: tuple[int, ...] = ()
    int8_layers: tuple[int, ...] | Literal["auto"] = "auto"
    attention: Literal["auto", "turbo", "int8", "half", "fp8", "native"] = "auto"
    sparse: SparseConfig | None = None
    compile: Literal["tuned"] | bool = False
    cuda_graphs: Literal["auto"] | bool = "auto"
    expert: Expert = Expert()

    def __post_init__(self) -> None:
        for field in ("int8_layers", "dense_layers"):
            freeze_layers(self, field)
        if not isinstance(self.expert, Expert):
            raise ValueError(f"TurboConfig.expert must be an Expert; got {self.expert!r}.")
        one_of("bits", self.bits, WIDTHS, "TurboConfig")
        if self.bits != UNQUANTIZED:
            one_of("value_bits", self.value_bits, (*BITS, None), "TurboConfig")
        self._check_layer_bits()
        one_of("attention", self.attention, ("auto", *ATTENTION_MODES), "TurboConfig")
        one_of("cuda_graphs", self.cuda_graphs, ("auto", True, False), "TurboConfig")
        one_of("compile", self.compile, (True, False, "tuned"), "TurboConfig")
        if self.compile and self.cuda_graphs is False:
            raise ValueError(
                f"TurboConfig.compile={self.compile!r} compiles the layers of decode steps that are captured as CUDA "
                "graphs, and cuda_graphs=False captures none. Leave out one of them."
            )
        if self.expert.low_heads and self.expert.low_bits >= self.bits:
            raise ValueError(
                f"Expert.low_bits must be below bits ({self.bits}) when low_heads is not 0; got {self.expert.low_bits}."
            )
        if self.bits == UNQUANTIZED:
            self._check_16bit()
        self._check_recent()
        if not isinstance(self.int8_layers, str) or self.int8_layers != "auto":
            layer_indices("int8_layers", self.int8_layers, ' or "auto"', "TurboConfig")
        layer_indices("dense_layers", self.dense_layers, "", "TurboConfig")
        if self.sparse is not None and not isinstance(self.sparse, SparseConfig):
            raise ValueError(f"TurboConfig.sparse must be a SparseConfig or None; got {self.sparse!r}.")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> "TurboConfig":
        """A config of options by name, as `to_dict` and JSON or YAML files have them.

        Args:
            options: the fields that are given; the others have the values of the preset named by "preset", or else
                their defaults. Layers may be lists; "sparse" and "expert" are dicts of what is given in them, or
                "sparse" None.

        Raises:
            ValueError: an unknown name (the message has the known ones), an unknown preset, or a wrong value.
        """
        given = cls._known(options, ("preset",))
        name = given.pop("preset", DEFAULT_PRESET)
        if not isinstance(name, str) or name not in NAMED:
            raise ValueError(f"unknown preset {name!r}; presets are {', '.join(ADVISED)}.")
        base = NAMED[name]
        for field, kind in cls.nested.items():
            if isinstance(given.get(field), Mapping):
                given[field] = replace(getattr(base, field) or kind(), **kind._known(given[field]))
        return replace(base, **given)

    def _check_layer_bits(self) -> None:
        """ValueError unless layers may have bits of their own as asked for; lists become tuples."""
        given: Any = self.layer_bits
        if given is None:
            return
        named = isinstance(given, str) and given == BY_CALIBRATION
        widths = [tuple(x) if isinstance(x, list) else x for x in given] if isinstance(given, list | tuple) else []
        numbers = [n for x in widths for n in (x if isinstance(x, tuple) else (x,))]
        # types first: numpy's arrays are not compared to one truth
        known = all(type(n) is int for n in numbers) and all(x in (*BITS, *product(BITS, BITS)) for x in widths)
        if not named and not (widths and known):
            raise ValueError(
                f"TurboConfig.layer_bits must be numbers of {', '.join(map(str, BITS))}, or pairs of them for keys and "
                f'values, first layers first, or "{BY_CALIBRATION}"; got {given!r}.'
            )
        others = {
            "bits": self.bits != DEFAULT_BITS,
            "value_bits": self.value_bits is not None,
            "low_heads": self.expert.low_heads,
        }
        if any(others.values()):
            name = next(name for name, set_ in others.items() if set_)
            raise ValueError(f"TurboConfig.layer_bits does not go with {name}: it gives all bits. Leave {name} out.")
        if not named:
            # what means the same is written the same: (2, 2) is 2
            object.__setattr__(self, "layer_bits", tuple(_width(*widths_of(x)) for x in widths))

    def _check_recent(self) -> None:
        """ValueError unless the newest tokens may stay open as asked for."""
        recent, block = self.recent_tokens, self.expert.block_size
        if recent is None:
            return
        if isinstance(recent, bool) or not isinstance(recent, int) or not 0 <= recent <= MOST_RECENT or recent % block:
            raise ValueError(
                f"TurboConfig.recent_tokens must be None or a multiple of block_size ({block}), from 0 to "
                f"{MOST_RECENT}; got {recent!r}."
            )
        if recent and (self.bits == UNQUANTIZED or self.sparse is not None):
            why = (
                "sparse, whose blocks are in bucket order" if self.sparse is not None else "bits=16, which rounds none"
            )
            raise ValueError(f"TurboConfig.recent_tokens does not go with {why}. Leave one of them out.")

    def _check_16bit(self) -> None:
        """ValueError for options that round what 16-bit heads keep unrounded."""
        if self.value_bits is not None:
            raise ValueError(
                "TurboConfig.value_bits goes with bits of 8, 4, 3 or 2: no kernel reads 16-bit keys beside packed "
                f"values; got bits=16 and value_bits={self.value_bits!r}, leave one of them out."
            )
        if self.expert.low_heads:
            raise ValueError(
                "Expert.low_heads goes with bits of 8, 4, 3 or 2: all heads of a layer of 16 bit have 16; got "
                f"low_heads={self.expert.low_heads!r}, leave one of them out."
            )
        if self.attention not in ("auto", "native"):
            raise ValueError(
                f'TurboConfig.attention must be "auto" or "native" with bits=16, which rounds nothing; '
                f"got {self.attention!r}."
            )

    @property
    def begins(self) -> int:
        """Tokens that a prompt has at least where anything is stored below 8 bit, or not read by all steps; a shorter
        one tells nothing of the config."""
        sealed = 0 if self.bits >= 8 else self.first_tokens + self.recent + self.expert.block_size
        steps = self.sparse.sink_tokens + self.sparse.window_tokens + 1 if self.sparse is not None else 0
        return max(sealed, steps)

    @property
    def first_tokens(self) -> int:
        """First tokens of each row that are never sealed (`layout`), where every step reads all tokens."""
        return 0 if self.bits == UNQUANTIZED else FIRST

    @property
    def recent(self) -> int:
        """Newest tokens of each row that are not sealed yet: `recent_tokens`, or what its default means."""
        if self.recent_tokens is not None:
            return self.recent_tokens
        least = min(self.bits, self.value_bits or 8, self.expert.low_bits if self.expert.low_heads else 8)
        packed = least < 8 and self.bits != UNQUANTIZED
        return self.expert.block_size if packed and self.sparse is None else 0

    @property
    def prompt_attention(self) -> str:
        """The `attention` of prompts: what is stored unrounded is not rounded before, either."""
        return "native" if self.bits == UNQUANTIZED else self.attention

    @property
    def decode_attention(self) -> Literal["turbo", "native"]:
        """The `attention` of decode steps, which have only these two modes."""
        return "native" if self.attention == "native" else "turbo"

    def head_groups(self, kv_heads: int) -> HeadGroups:
        """(width, number of heads) for each group of a layer's `kv_heads` heads, widest first."""
        low = int(self.expert.low_heads * kv_heads)  # rounded down: an odd head keeps the higher width
        low_bits = self.expert.low_bits
        low_width = _width(low_bits, min(low_bits, self.value_bits or low_bits))
        groups = ((_width(self.bits, self.value_bits), kv_heads - low), (low_width, low))
        return tuple((width, heads) for width, heads in groups if heads)


def _width(bits: int, value_bits: int | None) -> Width:
    return bits if value_bits in (None, bits) else (bits, value_bits)


DEFAULT_PRESET = "turbo4"

PRESETS: dict[str, TurboConfig] = {
    "int8": TurboConfig(bits=8),
    DEFAULT_PRESET: TurboConfig(bits=4),
    "turbo-k4v3": TurboConfig(bits=4, value_bits=3),
    "saap": TurboConfig(bits=4, sparse=SparseConfig()),
}
"""INT8; 4 bit (the default); keys of 4 bit with values of 3; sparse decoding over 4 bit, which needs a calibration."""

ABLATIONS: dict[str, TurboConfig] = {
    "turbo-k4v2": TurboConfig(bits=4, value_bits=2),
    "turbo-mixed": TurboConfig(bits=4, expert=Expert(low_bits=2, low_heads=0.5)),
    "turbo2": TurboConfig(bits=2),
}
"""Keys of 4 bit with values of 2; TurboAttention's head priority (half of the heads at 2 bit); 2 bit. They can be
named, and warn."""

NAMED = {**PRESETS, **ABLATIONS, BY_CALIBRATION: TurboConfig(layer_bits=BY_CALIBRATION)}
"""Every config that has a name. "calibrated" needs a calibration with widths."""


ADVISED = (*PRESETS, BY_CALIBRATION)
"""Names that errors give."""


def not_recommended(config: TurboConfig) -> str | None:
    """Why a config is not recommended, as a sentence with figures; None: nothing of it has 2 bits, or a calibration
    decides, which tells its own figures."""
    if isinstance(config.layer_bits, str):
        return None
    widths = [widths_of(width) for width in config.layer_bits or ((config.bits, config.value_bits or config.bits),)]
    if not any(2 in width for width in widths) and not (config.expert.low_heads and config.expert.low_bits == 2):
        return None
    # `eval/results/fidelity-log.md`
    return (
        "2 bit is not like 16 bit on real checkpoints: on SmolLM2-135M the mean KL is 0.007 nats with 2-bit values "
        "(turbo-k4v2), 0.045 at 2 bit (turbo2; 0.19 on a 1.5B model), 0.0035 at 4 bit "
        f"({DEFAULT_PRESET}). Evaluate on your tasks, and see turbo-hf fidelity."
    )


ConfigLike = str | Path | Mapping[str, Any] | TurboConfig
"""A `TurboConfig`, a preset's name, a dict of options, or the path of a JSON or YAML file."""


def resolve_config(config: ConfigLike) -> TurboConfig:
    """The `TurboConfig` that a `ConfigLike` stands for.

    Raises:
        ValueError: no preset's name (the message has them), or a dict or file that `TurboConfig.from_dict` refuses; the
            message names the file.
        OSError: a file that is not there, or cannot be read.
    """
    if isinstance(config, TurboConfig):
        return config
    if isinstance(config, str) and config in NAMED:
        return NAMED[config]
    if isinstance(config, Mapping):
        return TurboConfig.from_dict(config)
    if isinstance(config, str | Path) and names_a_file(config):
        options = read_mapping(Path(config))
        try:
            return TurboConfig.from_dict(options)
        except ValueError as error:
            raise ValueError(f"the config file {config}: {error}") from error
    raise ValueError(
        f"config must be a TurboConfig, a dict of its options, a {', '.join(SUFFIXES)} file, or one of the presets "
        f"{', '.join(ADVISED)}; got {config!r}."
    )


def with_options(config: TurboConfig, **options: Any) -> TurboConfig:
    """The config with other options by name, those of `Expert` among them. ValueError: as of `TurboConfig`."""
    expert = {name: options.pop(name) for name in Expert.names() if name in options}
    return replace(config, expert=replace(config.expert, **expert), **options)


def at_8_bit(config: TurboConfig) -> TurboConfig:
    """The same options for a layer that is kept at 8 bit."""
    return with_options(config, bits=8, value_bits=None, layer_bits=None, low_heads=0.0)


def unrounded(config: TurboConfig) -> TurboConfig:
    """Options that round nothing, with the blocks and the backend of a config."""
    kept = Expert(block_size=config.expert.block_size, backend=config.expert.backend)
    return TurboConfig(bits=UNQUANTIZED, attention="native", expert=kept)


def of_layer(config: TurboConfig, index: int, layers: int) -> TurboConfig:
    """The options of one layer of so many: with `layer_bits`, those with its own bits; of `dense_layers` such as round
    nothing.

    Raises:
        ValueError: `layer_bits` are of another number of layers, or still to come from a calibration.
    """
    if index in config.dense_layers:
        return unrounded(config)
    if config.layer_bits is None:
        return config
    if isinstance(config.layer_bits, str):
        raise ValueError(f'TurboConfig.layer_bits="{BY_CALIBRATION}" needs a calibration. Patch a model with it.')
    if len(config.layer_bits) != layers:
        raise ValueError(
            f"TurboConfig.layer_bits has the bits of {len(config.layer_bits)} layers, and the model has {layers}. Name "
            "them for each layer, first to last."
        )
    bits, value_bits = widths_of(config.layer_bits[index])
    return replace(config, bits=bits, value_bits=value_bits, layer_bits=None)
