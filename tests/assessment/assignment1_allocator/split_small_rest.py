"""Step 1: one rule for both pools"""

STEP, HINT = 1, "small_rest"


class Allocator:
    def split(self, block, size):
        rest = block.size - size
        if rest <= (MIN_BLOCK if block.small else SMALL):
            return
        new = Block(block.address + size, rest, block.segment, block.stream)
        new.previous, new.next = block, block.next
        if block.next:
            block.next.previous = new
        block.next, block.size = new, size
        self.cached.append(new)
