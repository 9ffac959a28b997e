"""Step 5: the hook waits"""

import torch.distributed as dist

STEP, HINT = 5, "synchronous"


class HookDDP:
    def start(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    def finish(self):
        pass
