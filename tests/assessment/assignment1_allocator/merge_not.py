"""Step 2: nothing is merged"""

STEP, HINT = 2, "not_merged"


class Allocator:
    def give_back(self, block: Block) -> None:
        block.state = "free"
        self.cached.append(block)
