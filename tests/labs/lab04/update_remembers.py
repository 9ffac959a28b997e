"""Step 4: the verdict stays"""

STEP, HINT = 4, "verdict_kept"


class Scaler:
    def update(self):
        if self.overflow:
            self.value, self.good_steps = (self.value / 2, 0)
        else:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.value, self.good_steps = (self.value * 2, 0)
        pass
