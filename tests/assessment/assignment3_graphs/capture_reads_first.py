"""Step 1: read, and then refused"""

STEP, HINT = 1, "host_read"


class Capture:
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        out = func(*args, **kwargs)
        if name in HOST_READS:
            raise RuntimeError(name)
        ins = tuple(
            dict.fromkeys(
                self.number(t)
                for t in tree_leaves((args, kwargs))
                if isinstance(t, torch.Tensor)
            )
        )
        if not func.is_view:
            self.nodes.append(Node(name, ins, self.number(out)))
        return out
