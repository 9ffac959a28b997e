"""Step 4: the average before the step"""

STEP, HINT = 4, "gradients"


class LocalSGD:
    def step(self) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            self.average()
        self.optimizer.step()
