"""Step 3: other streams are not asked"""

STEP, HINT = 3, "given_early"


class Allocator:
    def free(self, block: Block) -> None:
        self.used.remove(block)
        self.give_back(block)

    def collect(self) -> None:
        pass
