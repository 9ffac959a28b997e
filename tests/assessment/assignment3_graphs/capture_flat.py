"""Step 1: tensors in lists are not seen"""

STEP, HINT = 1, "nested"


class Capture:
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in HOST_READS:
            raise RuntimeError(f"not permitted: {name}")
        inputs = tuple(dict.fromkeys(self.number(t) for t in args if torch.is_tensor(t)))
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.nodes.append(Node(name, inputs, self.number(result)))
        return result
