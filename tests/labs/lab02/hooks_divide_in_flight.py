"""Step 5: divided while the all-reduce runs"""

import torch.distributed as dist

STEP, HINT = 5, "touched"


class HookDDP:
    def start(self, parameter):
        self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))
        parameter.grad /= dist.get_world_size()

    def finish(self):
        for _, work in self.started:
            work.wait()
        self.started.clear()
