"""Step 1: every rest becomes a block"""

STEP, HINT = 1, "always_split"


class Allocator:
    def split(self, block: Block, size: int) -> None:
        rest = block.size - size
        if rest < MIN_BLOCK:
            return
        new = Block(block.address + size, rest, block.segment, block.stream)
        new.previous, new.next = block, block.next
        if block.next:
            block.next.previous = new
        block.next, block.size = new, size
        self.cached.append(new)
