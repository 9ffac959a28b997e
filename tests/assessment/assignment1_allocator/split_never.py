"""Step 1: no rest becomes a block"""

STEP, HINT = 1, "never_split"


class Allocator:
    def split(self, block: Block, size: int) -> None:
        return
