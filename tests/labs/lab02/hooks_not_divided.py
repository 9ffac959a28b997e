"""Step 5: the sum in place of the mean"""

STEP, HINT = 5, "not_divided"


class HookDDP:
    def finish(self):
        for _, work in self.started:
            work.wait()
        self.started.clear()
