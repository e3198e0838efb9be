"""Small tensor functions in plain torch that launches and references share."""

import torch

from turbo_hf.layout import LEAST, Rotary

LINE = 4096
"""Bytes that `checksum` adds up before it weighs their sum by its place."""


def ratio(a: torch.Tensor | float, b: torch.Tensor | float) -> torch.Tensor:
    """a / b by one IEEE division in float32, the same on every device.

    torch multiplies by a rounded reciprocal where one of them is a number.
    """
    like = a if isinstance(a, torch.Tensor) else b
    assert isinstance(like, torch.Tensor)
    x, y = (x if isinstance(x, torch.Tensor) else like.new_full((), x) for x in (a, b))
    return x / y


def counted(largest: torch.Tensor) -> torch.Tensor:
    """The largest |x| of tokens, float32, with 0 for those that count as 0 (`layout.LEAST`); NaN stays."""
    return largest.masked_fill(largest < LEAST, 0.0)


def scaled(x: torch.Tensor, largest: torch.Tensor, top: float) -> torch.Tensor:
    """x * (top / largest) in float64, and 0 where largest is 0; largest is float32 with x's leading dimensions.

    The quotient is rounded to float32 and the product is not, which is what a fused multiply-add rounds to a code.
    """
    inverse = ratio(top, torch.where(largest > 0, largest, 1.0))
    return x.double() * inverse.double()[(...,) + (None,) * (x.dim() - largest.dim())]


def align(x: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor:
    """x [B, H, M, D] with each row's tokens from place 0 on, followed by zeros."""
    if starts is None:
        return x
    take = (torch.arange(x.shape[2], device=x.device) + starts[:, None])[:, None, :, None]
    last = x.shape[2] - 1
    return torch.take_along_dim(x, take.clamp(max=last), 2).masked_fill(take > last, 0.0)


def balanced_keys(k: torch.Tensor, balance: torch.Tensor | None) -> torch.Tensor:
    """Keys [B, Hkv, M, D] as they are stored (`layout`), in float32 at least; without a balance k itself."""
    return k if balance is None else k / balance[:, None]


def balanced_queries(q: torch.Tensor, balance: torch.Tensor | None) -> torch.Tensor:
    """Queries [B, Hq, M, D] that meet keys as `balanced_keys` leaves them, in q's dtype: scores are unchanged."""
    if balance is None:
        return q
    grouped: torch.Tensor = q.unflatten(1, (len(balance), -1)) * balance[:, None, None]
    return grouped.to(q.dtype).flatten(1, 2)


def undo_rotary_halves(x: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """x [B, H, M, D] in float32 before rotary embedding; rotary: (cos, sin) [1 or B, M, r] of its tokens, or None.

    Half layout: channels c and c + r/2 rotate together; channels from r on do not rotate.
    """
    if rotary is None:
        return x.float()
    cos, sin = (part.float()[:, None] for part in rotary)
    size = cos.shape[-1]
    turned, rest = x.float()[..., :size], x.float()[..., size:]
    low, high = turned.chunk(2, -1)
    plain = (turned * cos - torch.cat((-high, low), -1) * sin) / (cos * cos + sin * sin)
    return torch.cat((plain, rest), -1)


def checksum(x: torch.Tensor) -> torch.Tensor:
    """int64 [] on x's device: changes with any byte of x, and where lines of it change places. Exact on each device."""
    flat = x.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // LINE * LINE
    rest = torch.nn.functional.pad(flat[whole:], (0, LINE - flat.numel() + whole)).view(torch.int64)
    sums = torch.cat((flat[:whole].view(torch.int64).view(-1, LINE // 8).sum(1), rest.sum().view(1)))
    return (sums * torch.arange(1, 2 * len(sums), 2, device=x.device)).sum()


def reference_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, plus: int, early: bool) -> torch.Tensor:
    """x [..., dim] over its root mean square, times weight [dim] plus `plus`, in its dtype; computed in float32."""
    wide = x.float()
    out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if early:
        out = out.to(x.dtype).float()
    return (out if weight is None else out * (weight.float() + plus)).to(x.dtype)
