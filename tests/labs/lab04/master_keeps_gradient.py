"""Step 6: the fp32 gradients stay"""

import torch

STEP, HINT = 6, "gradient_kept"


class MasterAdam:
    @torch.no_grad()
    def step(self):
        for parameter, master in zip(self.parameters, self.master, strict=True):
            master.grad = parameter.grad.float()
        self.inner.step()
        for parameter, master in zip(self.parameters, self.master, strict=True):
            parameter.copy_(master)
