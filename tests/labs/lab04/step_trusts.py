"""Step 4: scaled gradients reach the optimizer"""

STEP, HINT = 4, "step_unscales"


class Scaler:
    def step(self, optimizer):
        if not self.overflow:
            optimizer.step()
