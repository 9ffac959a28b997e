"""Step 1: an input is listed twice"""

STEP, HINT = 1, "twice"


class Capture:
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in HOST_READS:
            raise RuntimeError(f"not permitted: {name}")
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            inputs = tuple(map(self.number, tensors))
            self.nodes.append(Node(name, inputs, self.number(result)))
        return result
