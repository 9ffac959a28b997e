"""Step 1: the rest goes to the default stream"""

STEP, HINT = 1, "rest_stream"


class Allocator:
    def split(self, block: Block, size: int) -> None:
        rest = block.size - size
        if rest < MIN_BLOCK if block.small else rest <= SMALL:
            return
        new = Block(block.address + size, rest, block.segment, 0)
        new.previous, new.next = block, block.next
        if block.next:
            block.next.previous = new
        block.next, block.size = new, size
        self.cached.append(new)
