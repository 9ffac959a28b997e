"""Step 4: a loop over a list that it shortens"""

STEP, HINT = 4, "no_retry"


class Allocator:
    def grow(self, size, stream):
        wanted = segment_size(size)
        address = self.device.malloc(wanted)
        if address is None:
            self.device.synchronize()
            self.collect()
            for block in self.cached:
                if block.size == block.segment:
                    self.cached.remove(block)
                    self.device.free(block.size)
            address = self.device.malloc(wanted)
            if address is None:
                raise MemoryError
        block = Block(address, wanted, wanted, stream)
        self.cached.append(block)
        return block
