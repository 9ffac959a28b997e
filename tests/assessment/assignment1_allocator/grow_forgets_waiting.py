"""Step 4: blocks that wait are not asked for"""

STEP, HINT = 4, "waits_forgotten"


class Allocator:
    def grow(self, size: int, stream: int) -> Block:
        wanted = segment_size(size)
        address = self.device.malloc(wanted)
        if address is None:
            for block in [block for block in self.cached if block.size == block.segment]:
                self.cached.remove(block)
                self.device.free(block.segment)
            address = self.device.malloc(wanted)
        if address is None:
            raise MemoryError(f"{wanted} bytes wanted: {self.report()}")
        block = Block(address, wanted, wanted, stream)
        self.cached.append(block)
        return block
