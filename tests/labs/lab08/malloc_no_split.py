"""Step 8: the whole piece"""

STEP, HINT = 8, "split"


class Allocator:
    def malloc(self, size: int) -> int:
        """Give away at least `size` bytes; return where they start."""
        size = -(-size // 512) * 512
        fitting = [p for p in self.pieces if not p.used and p.size >= size]
        if not fitting:
            raise self.out_of_memory(size)
        piece = min(fitting, key=lambda p: p.size)
        piece.used = True
        return piece.start
