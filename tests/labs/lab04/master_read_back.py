"""Step 6: the copies follow the parameters"""

import torch

STEP, HINT = 6, "master_overwritten"


class MasterAdam:
    @torch.no_grad()
    def step(self):
        for parameter, master in zip(self.parameters, self.master, strict=True):
            master.grad = parameter.grad.float()
        self.inner.step()
        for parameter, master in zip(self.parameters, self.master, strict=True):
            parameter.copy_(master)
            master.copy_(parameter)
            master.grad = None
