"""Step 5: finish does not wait"""

STEP, HINT = 5, "not_waited"


class HookDDP:
    def finish(self):
        for parameter, _ in self.started:
            parameter.grad.mul_(1)
        self.started.clear()
