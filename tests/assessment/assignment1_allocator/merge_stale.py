"""Step 2: the merged block stays in the cache"""

STEP, HINT = 2, "stale"


class Allocator:
    def give_back(self, block: Block) -> None:
        block.state = "free"
        if block.next and block.next.state == "free":
            gone = block.next
            block.size, block.next = block.size + gone.size, gone.next
            if gone.next:
                gone.next.previous = block
        if block.previous and block.previous.state == "free":
            left = block.previous
            left.size, left.next = left.size + block.size, block.next
            if block.next:
                block.next.previous = left
        self.cached.append(block)
