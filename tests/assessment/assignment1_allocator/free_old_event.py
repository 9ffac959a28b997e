"""Step 3: the event of the first kernel that was done"""

STEP, HINT = 3, "event_of_use"


class Allocator:
    def free(self, block: Block) -> None:
        self.used.remove(block)
        if not block.users:
            return self.give_back(block)
        # as if they had been recorded by record_stream, before the last launch
        block.events = [
            (stream, self.device.launched[stream] - (self.device.finished[stream] > 0))
            for stream in block.users
        ]
        block.state = "waiting"
        self.waiting.append(block)
