"""Step 4: asks before it counts"""

STEP, HINT = 4, "when"


class LocalSGD:
    def step(self):
        if self.steps % self.every == 0:
            self.average()
        self.optimizer.step()
        self.steps += 1
