"""Step 5: biases get no hook"""

import torch.distributed as dist

STEP, HINT = 5, "subset"


class HookDDP:
    def start(self, parameter):
        if parameter.dim() > 1:
            self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))
