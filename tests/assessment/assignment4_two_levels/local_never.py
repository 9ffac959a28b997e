"""Step 4: it is never averaged"""

STEP, HINT = 4, "never"


class LocalSGD:
    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1
