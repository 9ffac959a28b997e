"""Step 3: the block waits for its own stream"""

STEP, HINT = 3, "own_event"


class Allocator:
    def free(self, block: Block) -> None:
        self.used.remove(block)
        if not block.users:
            return self.give_back(block)
        users = block.users | {block.stream}
        block.events = [self.device.event(stream) for stream in users]
        block.state = "waiting"
        self.waiting.append(block)

    def collect(self) -> None:
        for block in list(self.waiting):
            others = block.users
            done = all(map(self.device.query, block.events))
            if done or (
                len(others) > 1
                and all(self.device.query(e) for e in block.events if e[0] != block.stream)
            ):
                self.waiting.remove(block)
                self.give_back(block)
