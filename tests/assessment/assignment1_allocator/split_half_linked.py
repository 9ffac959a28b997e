"""Step 1: the block behind still points to the one before"""

STEP, HINT = 1, "links"


class Allocator:
    def split(self, block: Block, size: int) -> None:
        rest = block.size - size
        if rest < MIN_BLOCK if block.small else rest <= SMALL:
            return
        new = Block(block.address + size, rest, block.segment, block.stream)
        new.previous, new.next = block, block.next
        block.next, block.size = new, size
        self.cached.append(new)
