"""Step 4: the verdict turned round"""

STEP, HINT = 4, "never_steps"


class Scaler:
    def step(self, optimizer):
        if self.overflow is None:
            self.unscale_(optimizer)
        if self.overflow is None:
            optimizer.step()
