"""Step 5: the largest of all blocks"""

STEP, HINT = 5, "largest"


class Allocator:
    def report(self) -> dict[str, int]:
        blocks = self.used, self.waiting, self.cached
        used, waiting, cached = (sum(block.size for block in some) for some in blocks)
        largest = max((block.size for some in blocks for block in some), default=0)
        return {
            "reserved": used + waiting + cached, "used": used, "waiting": waiting,
            "cached": cached, "largest": largest,
        }  # fmt: skip
