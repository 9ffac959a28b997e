"""Step 4: only a reference is dropped"""

STEP, HINT = 4, "free"


class Unit:
    def free(self):
        self.gathered = None
