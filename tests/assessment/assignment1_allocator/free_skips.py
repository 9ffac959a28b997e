"""Step 3: a loop over a list that it shortens"""

STEP, HINT = 3, "skipped"


class Allocator:
    def collect(self):
        for block in self.waiting:
            if all(self.device.query(e) for e in block.events):
                self.waiting.remove(block)
                self.give_back(block)
