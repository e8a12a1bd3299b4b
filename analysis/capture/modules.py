"""What a module is, seen from outside: linear or not, quantised already, an RMSNorm over the whole width."""

from __future__ import annotations

import threading

from torch import Tensor, finfo, nn

from analysis.measure.stats import Norm


def alive(thread: int) -> bool:
    """Whether a thread with this identifier runs."""
    return any(t.ident == thread for t in threading.enumerate())


def is_quantized(module: nn.Module) -> bool:
    """A linear layer whose weight is held in integers: upstream's own, bitsandbytes', torchao's."""
    return isinstance(getattr(module, "in_features", None), int)


def is_linear(module: nn.Module) -> bool:
    """A linear layer with a floating weight, also while FSDP has taken the weight away."""
    features = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    if not all(isinstance(n, int) for n in features):
        return False
    weight = getattr(module, "weight", None)
    return weight.is_floating_point() if isinstance(weight, Tensor) else isinstance(module, nn.Linear)


def rms_norm_of(module: nn.Module | None, width: int) -> Norm | None:
    """Weight and eps of an RMSNorm over the whole [width]; None for any other norm (per head, with a mean)."""
    weight, eps = getattr(module, "weight", None), getattr(module, "eps", None)
    if module is None or isinstance(module, nn.LayerNorm) or not isinstance(weight, Tensor):
        return None
    if eps is None:
        eps = getattr(module, "variance_epsilon", None)
    if eps is None and isinstance(module, nn.RMSNorm):
        eps = finfo(weight.dtype).eps
    return (weight.detach(), eps) if isinstance(eps, float) and weight.shape == (width,) else None
