"""Step 4: a block without an address"""

STEP, HINT = 4, "no_error"


class Allocator:
    def grow(self, size: int, stream: int) -> Block:
        wanted = segment_size(size)
        address = self.device.malloc(wanted)
        if address is None:
            self.device.synchronize()
            self.collect()
            for block in [block for block in self.cached if block.size == block.segment]:
                self.cached.remove(block)
                self.device.free(block.segment)
            address = self.device.malloc(wanted)
        block = Block(address, wanted, wanted, stream)
        self.cached.append(block)
        return block
