"""Step 5: everything is sent after backward"""

import torch.distributed as dist

STEP, HINT = 5, "not_early"


class HookDDP:
    def start(self, parameter):
        self.started.append(parameter)

    def finish(self):
        for parameter in self.started:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        self.started.clear()
