"""Step 4: each gradient overwrites the verdict"""

import torch
import torch.distributed as dist

STEP, HINT = 4, "one_gradient"


class Scaler:
    @torch.no_grad()
    def unscale_(self, optimizer):
        if self.overflow is not None:
            raise RuntimeError("unscale_() was called twice since the last update()")
        flag = torch.zeros((), device=self.device)
        for gradient in gradients_of(optimizer):  # noqa: F821
            flag.fill_(not gradient.isfinite().all())
            gradient.mul_(1 / self.value)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        self.overflow = bool(flag.item())
