"""Step 6: a copy with a history"""

import torch

STEP, HINT = 6, "master_leaf"


class MasterAdam:
    def __init__(self, parameters, lr=LEARNING_RATE):  # noqa: F821
        self.parameters = list(parameters)
        self.master = [parameter.float() for parameter in self.parameters]
        self.inner = torch.optim.Adam(self.master, lr=lr)
