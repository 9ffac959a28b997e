"""Step 4: pieces of segments are given to the driver"""

STEP, HINT = 4, "parts_freed"


class Allocator:
    def grow(self, size: int, stream: int) -> Block:
        wanted = segment_size(size)
        address = self.device.malloc(wanted)
        if address is None:
            self.device.synchronize()
            self.collect()
            for block in list(self.cached):
                self.cached.remove(block)
                self.device.free(block.size)
            address = self.device.malloc(wanted)
        if address is None:
            raise MemoryError(f"{wanted} bytes wanted: {self.report()}")
        block = Block(address, wanted, wanted, stream)
        self.cached.append(block)
        return block
