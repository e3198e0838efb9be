"""Options of a calibration run: `Settings` and its presets."""

from dataclasses import dataclass, replace

from turbo_hf.calibration.heads import BLOCK
from turbo_hf.config.options import at_least
from turbo_hf.config.turbo_config import LARGEST_SEED, MOST_BUCKETS

MIN_KEYS = 32
"""Minimum number of keys per centroid, if the number of centroids depends on the data."""

DEFAULT_CLUSTERS = 1024
SMALLEST_CLUSTERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a model is calibrated.

    Args:
        window: tokens per window of text, fed to the model in one pass; at least 64.
        windows: maximum number of windows; fewer if the texts are shorter, at least 2. One in five is held out.
        index: also make centroids and query classifiers; False: head priorities only, in a fraction of the time.
        clusters: centroids per KV head (C), at most 32,768; None: 1024, or fewer if there are under 32 keys for each.
        iterations: k-means iterations (SAAP appendix A: 10).
        queries: number of positions per window whose queries are kept.
        hidden: width of the hidden layer of the query classifier, an MLP D -> hidden -> C (SAAP sec. 5: 1024). From
            twice the head dim on training starts at k-means; below that, at random.
        steps: training steps (SAAP appendix A: 40,000 at a learning rate of 1e-5).
        batch: queries per step, for each KV head (SAAP appendix A: 1000).
        learning_rate: Adam's initial learning rate; it decays to 0 along a cosine. 1e-3 is no better on texts like
            those of the calibration, and forgets more of k-means on others (measured: `eval/results`).
        local: only pairs further apart than this many tokens count (SAAP sec. 4: 2047, the always-read tokens).
        far: evaluation covers only long-range queries, those whose best key is further away than this many tokens (SAAP
            sec. 5: 1024). Training sees all, which is better here (measured: `eval/results`).
        layers_at_once: layers captured and trained together. More is faster, and takes more memory.
        seed: seed of every random choice; below 2^32.
    """

    window: int = 8192
    windows: int = 48
    index: bool = True
    clusters: int | None = None
    iterations: int = 10
    queries: int = 1024
    hidden: int = 1024
    steps: int = 500
    batch: int = 256
    learning_rate: float = 3e-4
    local: int = 2047
    far: int = 1024
    layers_at_once: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        least = dict.fromkeys(("iterations", "queries", "hidden", "steps", "batch", "layers_at_once"), 1)
        # head priorities are computed over whole blocks
        least |= {"window": BLOCK, "windows": 2, "clusters": 2, "local": 0, "far": 0, "seed": 0}
        for name, number in least.items():
            if name != "clusters" or self.clusters is not None:
                at_least(name, getattr(self, name), number, "Settings")
        for name, most in (("clusters", MOST_BUCKETS), ("seed", LARGEST_SEED)):
            if (getattr(self, name) or 0) > most:
                raise ValueError(f"Settings.{name} must be at most {most}; got {getattr(self, name)}.")
        if type(self.index) is not bool:
            raise ValueError(f"Settings.index must be True or False; got {self.index!r}.")
        if not isinstance(self.learning_rate, float) or not 0 < self.learning_rate < 1:
            raise ValueError(f"Settings.learning_rate must be a number between 0 and 1; got {self.learning_rate!r}.")
        if self.index and self.window < self.shortest_window:
            raise ValueError(
                f"windows of {self.window} tokens are too short for the long-range filter: with local={self.local} "
                f"and far={self.far} they need {self.shortest_window}. Take longer windows, a smaller local or far, or "
                "index=False (--heads-only) for head priorities alone."
            )

    @property
    def shortest_window(self) -> int:
        """Number of tokens that a window must have to contain long-range queries."""
        return 2 * self.first_query

    @property
    def first_query(self) -> int:
        """First position whose query has a long-range key besides the sink."""
        return max(self.local, self.far) + 2


PRESETS: dict[str, Settings] = {
    "fast": Settings(),
    "full": Settings(window=32768, windows=40, queries=2048, steps=4000, batch=512, layers_at_once=2),
}
"""`fast`: a first calibration. `full`: longer windows, more of them, and longer training."""


def resolve_settings(settings: str | Settings, positions: int | None = None) -> Settings:
    """A preset's name or `Settings` -> `Settings` for a model made for `positions` tokens (None: any).

    A preset's windows are cut to what the model was made for. Raises ValueError for an unknown preset, and for windows
    of your own that are longer than that.
    """
    if isinstance(settings, str) and settings in PRESETS:
        preset = PRESETS[settings]
        window = min(preset.window, positions or preset.window)
        return preset if window == preset.window else replace(preset, window=window)
    if not isinstance(settings, Settings):
        raise ValueError(f"settings must be Settings or one of the presets {', '.join(PRESETS)}; got {settings!r}.")
    if positions is not None and settings.window > positions:
        raise ValueError(
            f"windows of {settings.window} tokens are longer than the {positions} positions that the model was made "
            "for. Take shorter windows."
        )
    return settings
