"""The exponential of SAS (TurboAttention sec. 4)."""

import torch


def sas_exp(x: torch.Tensor, threshold: float) -> torch.Tensor:
    """exp(x) for x <= 0 by a table and a cubic; 0 below `threshold`. TurboAttention sec. 4, eq. 13-15, alg. 3."""
    whole = torch.floor(-x.clamp(min=threshold))
    fraction = -x.clamp(min=threshold) - whole
    cubic = ((-0.1025 * fraction + 0.4626) * fraction - 0.9922) * fraction + 0.9996
    return torch.where(x < threshold, 0.0, torch.exp(-whole) * cubic)
