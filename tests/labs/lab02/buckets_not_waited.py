"""Step 6: finish does not wait"""

STEP, HINT = 6, "not_waited"


class BucketDDP:
    def finish(self):
        self.begin()
