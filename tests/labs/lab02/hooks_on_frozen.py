"""Step 5: a hook on a frozen parameter"""

from torch import nn

STEP, HINT = 5, "frozen_hook"


class HookDDP:
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module
        self.started = []
        broadcast_state(module)  # noqa: F821
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.start)
