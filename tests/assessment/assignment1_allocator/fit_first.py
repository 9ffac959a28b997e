"""Step 1: the first block that is large enough"""

STEP, HINT = 1, "first_fit"


class Allocator:
    def best_fit(self, size: int, stream: int) -> Block | None:
        for block in sorted(self.cached, key=lambda block: block.address):
            small = size <= SMALL
            if block.size >= size and block.stream == stream and block.small == small:
                return block
