"""Step 3: nothing is ever given back"""

STEP, HINT = 3, "kept_waiting"


class Allocator:
    def collect(self) -> None:
        pass
