"""Step 8: the right neighbour alone"""

STEP, HINT = 8, "join_left"


class Allocator:
    def free(self, start: int) -> None:
        """Take back the piece that starts there."""
        i = next(i for i, p in enumerate(self.pieces) if p.start == start)
        self.pieces[i].used = False
        for left in (i,):
            pair = self.pieces[left : left + 2] if left >= 0 else []
            if len(pair) == 2 and not pair[0].used and not pair[1].used:
                pair[0].size += pair[1].size
                del self.pieces[left + 1]
