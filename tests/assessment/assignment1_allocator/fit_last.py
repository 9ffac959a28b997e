"""Step 1: the higher of two blocks"""

STEP, HINT = 1, "tie"


class Allocator:
    def best_fit(self, size: int, stream: int) -> Block | None:
        fitting = [
            b
            for b in self.cached
            if b.size >= size and b.stream == stream and b.small == (size <= SMALL)
        ]
        return min(fitting, key=lambda block: (block.size, -block.address), default=None)
