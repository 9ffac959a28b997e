"""Step 4: the verdict of one rank"""

import torch

STEP, HINT = 4, "flag_own"


class Scaler:
    @torch.no_grad()
    def unscale_(self, optimizer):
        if self.overflow is not None:
            raise RuntimeError("unscale_() was called twice since the last update()")
        flag = torch.zeros((), device=self.device)
        for gradient in gradients_of(optimizer):  # noqa: F821
            if not gradient.isfinite().all():
                flag.fill_(1)
            gradient.mul_(1 / self.value)

        self.overflow = bool(flag.item())
