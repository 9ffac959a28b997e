"""Step 6: the copies get no gradients"""

import torch

STEP, HINT = 6, "gradient_missing"


class MasterAdam:
    @torch.no_grad()
    def step(self):
        for parameter in self.parameters:
            parameter.grad = parameter.grad.float().to(parameter.dtype)
        self.inner.step()
        for parameter, master in zip(self.parameters, self.master, strict=True):
            parameter.copy_(master)
            master.grad = None
