"""Step 2: a neighbour in use is merged, too"""

STEP, HINT = 2, "merged_used"


class Allocator:
    def give_back(self, block: Block) -> None:
        block.state = "free"
        if block.next:
            gone = block.next
            if gone in self.cached:
                self.cached.remove(gone)
            block.size, block.next = block.size + gone.size, gone.next
            if gone.next:
                gone.next.previous = block
        total = sum(other.size for other in self.cached)
        block.size = min(block.size, 20 * MIB - total)
        self.cached.append(block)
