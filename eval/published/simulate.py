"""Published ways to store keys and values in few bits, as plain torch that rounds and keeps the rounded values.

The bytes they would take are computed, not measured: nothing is packed here. Sources: KIVI (Liu et al. 2024,
arXiv:2402.02750, alg. 1), GEAR-L (Kang et al. 2024, arXiv:2403.05527, sec. 3), KVarN (Müller et al. 2026,
arXiv:2606.03458; the reference beside its kernel in github.com/huawei-csl/KVarN).
"""

from dataclasses import dataclass

import torch

SCALE_BYTES = 4
"""A group's scale and zero point, 16 bit each."""


def rounded(x: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """x after asymmetric rounding: 2**bits levels from the least to the largest value along `dim`. float32."""
    x = x.float()
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = (high - low) / (2**bits - 1)
    # a group of equal values has no step, and equals its own minimum
    codes = torch.where(step > 0, (x - low) / step, torch.zeros_like(x)).round()
    near: torch.Tensor = codes * step + low
    return near


def by_channel(x: torch.Tensor, bits: int, group: int | None) -> torch.Tensor:
    """x [..., T, D] rounded by channel, in groups of `group` tokens (T is a multiple of it); None: one group."""
    tokens = x.shape[-2]
    grouped: torch.Tensor = x.unflatten(-2, (-1, group or tokens))
    return rounded(grouped, bits, -2).flatten(-3, -2)


def by_token(x: torch.Tensor, bits: int, group: int | None) -> torch.Tensor:
    """x [B, H, T, D] rounded by token, in groups of `group` channels of a head; None: one group over all heads."""
    if group is None:
        heads = x.shape[1]
        whole = x.transpose(1, 2).flatten(2)
        split: torch.Tensor = rounded(whole, bits, -1).unflatten(-1, (heads, -1))
        return split.transpose(1, 2)
    channels = x.shape[-1]
    # a head narrower than a group is a group
    size = group if channels % group == 0 else channels
    return rounded(x.unflatten(-1, (-1, size)), bits, -1).flatten(-2)


def low_rank(x: torch.Tensor, rank: int) -> torch.Tensor:
    """The nearest matrices of that rank to x [..., T, D], each head's by itself: what GEAR's power iteration nears."""
    x = x.float()
    # the right singular vectors are eigenvectors of a matrix of D x D, far smaller than T x D; ascending. On the host:
    # a GPU solves small ones one after the other, and waits for each
    basis = torch.linalg.eigh((x.mT @ x).cpu()).eigenvectors[..., -rank:].to(x.device)
    near: torch.Tensor = x @ basis @ basis.mT
    return near


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a cache is stored, counted from a row's first token.

    bits: of a code.
    group: tokens of a channel's group of keys, and channels of a token's group of values; None: all tokens that are
        compressed at once, and all channels of all heads (KCVT).
    block: tokens that keys wait for in full precision, to be compressed together.
    window: newest values in full precision (KIVI); None: values wait like keys (GEAR).
    whole_prompt: the first pass is compressed to its last token.
    rank: of the added matrix for the first pass, 0 none.
    later_rank: the same for each later block.
    value_bits: of a value's code; None: as many as a key's.
    """

    bits: int
    group: int | None = 64
    block: int = 64
    window: int | None = None
    whole_prompt: bool = False
    rank: int = 0
    later_rank: int = 0
    value_bits: int | None = None

    def sealed(self, tokens: int, first: int) -> tuple[int, int]:
        """How many of a row's first `tokens` keys and values are compressed; `first`: tokens of its first pass."""
        begin = first if self.whole_prompt else first - first % self.block
        keys = begin + (tokens - begin) // self.block * self.block
        return keys, keys if self.window is None else max(0, tokens - self.window)

    def unit(self, part: int, *, prompt: bool) -> int | None:
        """Tokens of keys (part 0) or values (1) that are compressed together; None: all of a row's in a pass."""
        if not (self.rank if prompt else self.later_rank):
            # nothing binds tokens beyond a channel's group of keys, or a token's of values
            if part == 1:
                return 1
            if self.group is not None:
                return self.group
        return None if prompt or (part == 1 and self.window is not None) else self.block

    def keys(self, x: torch.Tensor, *, prompt: bool) -> torch.Tensor:
        """Keys [B, H, T, D] that are compressed together, as they are read from then on."""
        return self._completed(x, by_channel(x, self.bits, self.group), prompt)

    def values(self, x: torch.Tensor, *, prompt: bool) -> torch.Tensor:
        """Values [B, H, T, D] that are compressed together, as they are read from then on."""
        return self._completed(x, by_token(x, self.value_bits or self.bits, self.group), prompt)

    def _completed(self, x: torch.Tensor, base: torch.Tensor, prompt: bool) -> torch.Tensor:
        rank = self.rank if prompt else self.later_rank
        return (base + low_rank(x.float() - base, rank) if rank else base).to(x.dtype)

    def computed_bytes(self, tokens: int, first: int, heads: int, dim: int, itemsize: int) -> float:
        """Bytes of a row's keys and values in one layer: codes, 16-bit scales and zero points, 16-bit factors of the
        added matrices, and what waits in full precision."""
        keys, values = self.sealed(tokens, first)
        prompt, _ = self.sealed(first, first)
        blocks = (keys - prompt) // self.block
        codes = (keys * self.bits + values * (self.value_bits or self.bits)) * heads * dim / 8
        if self.group is None:
            scales = ((1 if prompt else 0) + blocks) * heads * dim + values
        else:
            channels = self.group if dim % self.group == 0 else dim
            scales = keys // self.group * heads * dim + values * heads * dim // channels
        # keys and values, a factor for the tokens and one for the channels
        factors = (
            2 * heads * (self.rank * (prompt + dim * bool(prompt)) + blocks * self.later_rank * (self.block + dim))
        )
        waiting = (2 * tokens - keys - values) * heads * dim
        return codes + SCALE_BYTES * scales + 2 * factors + itemsize * waiting


def kivi(bits: int, value_bits: int | None = None, group: int = 64) -> Scheme:
    """KIVI with groups of `group` and 64 newest values in full precision."""
    return Scheme(bits, group, block=group, window=64, value_bits=value_bits)


def gear_l(bits: int, base: str, value_bits: int | None = None, rank: int = 4) -> Scheme:
    """GEAR-L: `rank` for the prompt and half of it for each later block of 64 over "kcvt" (a group is a channel of all
    tokens, or a token of all heads) or "kivi" (groups of 64)."""
    kcvt = base == "kcvt"
    return Scheme(
        bits,
        None if kcvt else 64,
        whole_prompt=kcvt,
        rank=rank,
        later_rank=rank // 2,
        value_bits=value_bits,
    )


SINKHORN = 16
"""KVarN: rounds of scaling tokens and channels in turn."""

STD, LOG_SCALE = (1e-3, 1e3), (-0.3, 10.0)
"""KVarN: the ranges of deviations, and of the logarithms of scales. Nothing is scaled up by more than e^0.3."""


def balance(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of tokens [..., T, 1] and channels [..., 1, D] under which x [..., T, D] varies most evenly."""
    # logarithms
    tokens, channels = x[..., :1] * 0, x[..., :1, :] * 0
    now, best, kept = x, _unevenness(x), (tokens, channels)
    for _ in range(SINKHORN):
        tokens = (tokens + now.std(-1, keepdim=True).clamp(*STD).log()).clamp(*LOG_SCALE)
        now = x / tokens.exp() / channels.exp()
        channels = (channels + now.std(-2, keepdim=True).clamp(*STD).log()).clamp(*LOG_SCALE)
        now = x / tokens.exp() / channels.exp()
        uneven = _unevenness(now)
        kept = torch.where(uneven <= best, tokens, kept[0]), torch.where(uneven <= best, channels, kept[1])
        best = torch.minimum(uneven, best)
    return kept[0].exp(), kept[1].exp()


def _unevenness(x: torch.Tensor) -> torch.Tensor:
    """[..., 1, 1]: the largest over the smallest deviation, of tokens and of channels."""
    each = (x.std(dim, keepdim=True) for dim in (-1, -2))
    ratios = [std.amax((-1, -2), keepdim=True) / std.amin((-1, -2), keepdim=True).clamp(min=1e-8) for std in each]
    return ratios[0] + ratios[1]


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] times Sylvester's matrix of norm 1, its own inverse, in runs of the largest power of two in D."""
    dim = x.shape[-1]
    size = dim & -dim
    matrix = torch.ones(1, 1, device=x.device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1))) / 2**0.5
    turned: torch.Tensor = x.unflatten(-1, (-1, size)) @ matrix.to(x.dtype)
    return turned.flatten(-2)


@dataclass(frozen=True, slots=True)
class KVarN(Scheme):
    """Rotated tiles of `block` tokens, scaled by token and channel; keys are rounded by channel, values by token.

    value_bits: of a value's code.
    """

    value_bits: int = 2

    def unit(self, part: int, *, prompt: bool) -> int | None:
        """A tile."""
        return self.block

    def keys(self, x: torch.Tensor, *, prompt: bool) -> torch.Tensor:
        """As `Scheme.keys`."""
        return self._balanced(x, self.bits, -2)

    def values(self, x: torch.Tensor, *, prompt: bool) -> torch.Tensor:
        """As `Scheme.values`."""
        return self._balanced(x, self.value_bits, -1)

    def _balanced(self, x: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
        turned = hadamard(x.float()).unflatten(-2, (-1, self.block))
        tokens, channels = balance(turned)
        near = rounded(turned / tokens / channels, bits, dim) * tokens * channels
        return hadamard(near.flatten(-3, -2)).to(x.dtype)

    def computed_bytes(self, tokens: int, first: int, heads: int, dim: int, itemsize: int) -> float:
        """As `Scheme.computed_bytes`: 16-bit scale, zero point and second scale of each channel and token."""
        sealed, _ = self.sealed(tokens, first)
        codes = sealed * heads * dim * (self.bits + self.value_bits) / 8
        scales = sealed * heads * (1 + dim / self.block) * (SCALE_BYTES + 2)
        return codes + scales + itemsize * 2 * (tokens - sealed) * heads * dim


def kvarn(bits: int, block: int) -> KVarN:
    """KVarN's presets, of 2-bit values."""
    return KVarN(bits, group=block, block=block)
