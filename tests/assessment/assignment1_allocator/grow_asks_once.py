"""Step 4: the device is asked once"""

STEP, HINT = 4, "no_retry"


class Allocator:
    def grow(self, size: int, stream: int) -> Block:
        wanted = segment_size(size)
        address = self.device.malloc(wanted)
        if address is None:
            raise MemoryError(f"{wanted} bytes wanted: {self.report()}")
        block = Block(address, wanted, wanted, stream)
        self.cached.append(block)
        return block
