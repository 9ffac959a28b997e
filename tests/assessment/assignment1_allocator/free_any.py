"""Step 3: one of the streams is enough"""

STEP, HINT = 3, "given_early"


class Allocator:
    def collect(self) -> None:
        for block in list(self.waiting):
            if any(map(self.device.query, block.events)):
                self.waiting.remove(block)
                self.give_back(block)
