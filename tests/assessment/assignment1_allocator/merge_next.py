"""Step 2: only with the next block"""

STEP, HINT = 2, "not_merged"


class Allocator:
    def give_back(self, block: Block) -> None:
        block.state = "free"
        if block.next and block.next.state == "free":
            gone = block.next
            self.cached.remove(gone)
            block.size, block.next = block.size + gone.size, gone.next
            if gone.next:
                gone.next.previous = block
        self.cached.append(block)
