"""Step 4: unscaled again"""

STEP, HINT = 4, "unscaled_twice"


class Scaler:
    def step(self, optimizer):
        self.unscale_(optimizer)
        if not self.overflow:
            optimizer.step()
