"""Step 4: the cache is emptied before the device is asked"""

STEP, HINT = 4, "gives_up_early"


class Allocator:
    def grow(self, size: int, stream: int) -> Block:
        wanted = segment_size(size)
        for block in [block for block in self.cached if block.size == block.segment]:
            self.cached.remove(block)
            self.device.free(block.segment)
        address = self.device.malloc(wanted)
        if address is None:
            raise MemoryError(f"{wanted} bytes wanted: {self.report()}")
        block = Block(address, wanted, wanted, stream)
        self.cached.append(block)
        return block
