"""Keeps fp16 gradients inside their range."""

import torch


class LossScaler:
    def __init__(self, scale: float = 65536.0, interval: int = 2000) -> None:
        self.scale = scale
        self.interval = interval  # good steps before the scale doubles
        self.good = 0

    def unscale(self, grads: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """fp32 gradients of the loss itself, or None when the step must be skipped; adapts the scale."""
        # begin answer
        unscaled = [grad.float() / self.scale for grad in grads]
        if not all(torch.isfinite(grad).all() for grad in unscaled):
            self.scale, self.good = max(self.scale / 2, 1.0), 0
            return None
        self.good += 1
        if self.good >= self.interval:
            self.scale, self.good = self.scale * 2, 0
        return unscaled
        # end answer
