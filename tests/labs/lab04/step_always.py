"""Step 4: no step is skipped"""

STEP, HINT = 4, "not_skipped"


class Scaler:
    def step(self, optimizer):
        if self.overflow is None:
            self.unscale_(optimizer)
        optimizer.step()
