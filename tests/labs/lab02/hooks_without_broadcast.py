"""Step 5: the initial broadcast is lost"""

from torch import nn

STEP, HINT = 5, "no_initial_broadcast"


class HookDDP:
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module
        self.started = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.start)
