"""Step 6: a bf16 gradient for an fp32 copy"""

import torch

STEP, HINT = 6, "gradient_type"


class MasterAdam:
    @torch.no_grad()
    def step(self):
        for parameter, master in zip(self.parameters, self.master, strict=True):
            master.grad = parameter.grad
        self.inner.step()
        for parameter, master in zip(self.parameters, self.master, strict=True):
            parameter.copy_(master)
            master.grad = None
