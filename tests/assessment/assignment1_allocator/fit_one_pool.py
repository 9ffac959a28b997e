"""Step 1: one pool for all sizes"""

STEP, HINT = 1, "pools"


class Allocator:
    def best_fit(self, size: int, stream: int) -> Block | None:
        fitting = [b for b in self.cached if b.size >= size and b.stream == stream]
        return min(fitting, key=lambda block: (block.size, block.address), default=None)
