"""Step 6: Adam on the parameters"""

import torch

STEP, HINT = 6, "inner_wrong"


class MasterAdam:
    def __init__(self, parameters, lr=LEARNING_RATE):  # noqa: F821
        self.parameters = list(parameters)
        self.master = [parameter.detach().float().clone() for parameter in self.parameters]
        self.inner = torch.optim.Adam(self.parameters, lr=lr)
