"""Step 4: an overflow leaves the count"""

STEP, HINT = 4, "count_kept"


class Scaler:
    def update(self):
        if self.overflow:
            self.value, self.good_steps = (self.value / 2, self.good_steps)
        else:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.value, self.good_steps = (self.value * 2, 0)
        self.overflow = None
