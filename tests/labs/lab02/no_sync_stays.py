"""Step 7: sync is never switched on again"""

from contextlib import contextmanager

STEP, HINT = 7, "not_reenabled"


class AccumulatingDDP:
    @contextmanager
    def no_sync(self):
        self.sync = False
        yield
