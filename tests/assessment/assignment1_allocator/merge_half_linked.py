"""Step 2: one link is forgotten"""

STEP, HINT = 2, "links"


class Allocator:
    def give_back(self, block):
        block.state = "free"
        if block.next and block.next.state == "free":
            self.cached.remove(block.next)
            block.size += block.next.size
            block.next = block.next.next
        if block.previous and block.previous.state == "free":
            self.cached.remove(block.previous)
            block.previous.size += block.size
            block.previous.next = block.next
            block = block.previous
        self.cached.append(block)
