"""Step 1: the block of the nearest size"""

STEP, HINT = 1, "too_small"


class Allocator:
    def best_fit(self, size: int, stream: int) -> Block | None:
        ours = [b for b in self.cached if b.stream == stream and b.small == (size <= SMALL)]
        return min(ours, key=lambda block: abs(block.size - size), default=None)
