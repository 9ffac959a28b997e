"""Step 3: every block waits for an event"""

STEP, HINT = 3, "held_back"


class Allocator:
    def free(self, block: Block) -> None:
        self.used.remove(block)
        users = block.users or {block.stream}
        block.events = [self.device.event(stream) for stream in users]
        block.state = "waiting"
        self.waiting.append(block)
