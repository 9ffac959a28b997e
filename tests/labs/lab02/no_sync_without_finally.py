"""Step 7: an exception leaves sync off"""

from contextlib import contextmanager

STEP, HINT = 7, "not_restored"


class AccumulatingDDP:
    @contextmanager
    def no_sync(self):
        self.sync = False
        yield
        self.sync = True
