"""Step 6: the copy keeps the type"""

import torch

STEP, HINT = 6, "master_fp32"


class MasterAdam:
    def __init__(self, parameters, lr=LEARNING_RATE):  # noqa: F821
        self.parameters = list(parameters)
        self.master = [parameter.detach().clone() for parameter in self.parameters]
        self.inner = torch.optim.Adam(self.master, lr=lr)
