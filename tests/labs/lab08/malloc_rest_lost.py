"""Step 8: the rest is lost"""

STEP, HINT = 8, "rest_lost"


class Allocator:
    def malloc(self, size: int) -> int:
        """Give away at least `size` bytes; return where they start."""
        size = -(-size // 512) * 512
        fitting = [p for p in self.pieces if not p.used and p.size >= size]
        if not fitting:
            raise self.out_of_memory(size)
        piece = min(fitting, key=lambda p: p.size)
        piece.size, piece.used = size, True
        return piece.start
