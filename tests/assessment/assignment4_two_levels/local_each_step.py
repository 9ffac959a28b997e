"""Step 4: averaged in every step"""

STEP, HINT = 4, "too_often"


class LocalSGD:
    def step(self) -> None:
        self.optimizer.step()
        self.average()
