"""Step 6: the parameters stay"""

import torch

STEP, HINT = 6, "not_copied_back"


class MasterAdam:
    @torch.no_grad()
    def step(self):
        for parameter, master in zip(self.parameters, self.master, strict=True):
            master.grad = parameter.grad.float()
        self.inner.step()
        for master in self.master:
            master.grad = None
