# ruff: noqa: F821 (names of the lab)
"""Step 8: the largest"""

STEP, HINT = 8, "best_fit"


class Allocator:
    def malloc(self, size: int) -> int:
        """Give away at least `size` bytes; return where they start."""
        size = -(-size // 512) * 512
        fitting = [p for p in self.pieces if not p.used and p.size >= size]
        if not fitting:
            raise self.out_of_memory(size)
        piece = max(fitting, key=lambda p: p.size)
        if piece.size > size:
            rest = Piece(piece.start + size, piece.size - size)
            self.pieces.insert(self.pieces.index(piece) + 1, rest)
        piece.size, piece.used = size, True
        return piece.start
