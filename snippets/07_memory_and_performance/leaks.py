"""Five ways to leak tensors in Python, and how to fix each of them.

The program runs each way for ten steps. The leak is the number of bytes that are live
afterwards and were not live before.
"""

import functools
import gc
import weakref
from collections.abc import Callable

import torch
from torch import nn

TOKENS, H, STEPS = 256, 64, 10
Body = Callable[[nn.Module, list], None]


def batch() -> torch.Tensor:
    return torch.randn(TOKENS, H)


def live_bytes() -> int:
    """Bytes of all tensors that Python can reach, and of the graphs behind them."""
    seen: dict[int, int] = {}
    nodes: set[object] = set()
    stack = []
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            try:
                seen[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
            except RuntimeError:  # torch.compile's fake tensors have no memory
                continue
            stack.append(thing.grad_fn)
    while stack:
        node = stack.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                try:
                    saved = getattr(node, name)
                except RuntimeError:  # freed by backward
                    continue
                if isinstance(saved, torch.Tensor):
                    seen[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        stack.extend(following for following, _ in node.next_functions)
    return sum(seen.values())


# --8<-- [start:graph]
def loss_with_graph(model: nn.Module, log: list) -> None:
    loss = model(batch()).square().mean()  # for example in validation, without backward
    log.append(loss)


def loss_as_number(model: nn.Module, log: list) -> None:
    with torch.no_grad():
        loss = model(batch()).square().mean()
    log.append(loss.item())


# --8<-- [end:graph]
# --8<-- [start:traceback]
def error_kept(model: nn.Module, log: list) -> None:
    try:
        hidden = model(batch())
        hidden.view(-1, 7)  # fails
    except RuntimeError as error:
        log.append(error)  # error -> traceback -> frame -> hidden


def error_as_text(model: nn.Module, log: list) -> None:
    try:
        hidden = model(batch())
        hidden.view(-1, 7)
    except RuntimeError as error:
        log.append(str(error))


# --8<-- [end:traceback]
# --8<-- [start:hook]
def hook_left(model: nn.Module, log: list) -> None:
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(batch())


def hook_removed(model: nn.Module, log: list) -> None:
    seen = []
    handle = model.register_forward_hook(
        lambda module, inputs, output: seen.append(output.detach())
    )
    model(batch())
    handle.remove()


# --8<-- [end:hook]
# --8<-- [start:cache]
@functools.cache
def mask(step: int) -> torch.Tensor:  # keeps a tensor for every argument
    return torch.ones(TOKENS, H).tril()


@functools.lru_cache(maxsize=1)
def bounded_mask(step: int) -> torch.Tensor:
    return torch.ones(TOKENS, H).tril()


# --8<-- [end:cache]
# --8<-- [start:cycle]
class Node:
    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.children = value, []

    def child(self, parent: "Node") -> None:
        parent.children.append(self)
        self.parent = parent  # parent -> child -> parent


def cycle(model: nn.Module, log: list) -> None:
    Node(batch()).child(Node(batch()))


def no_cycle(model: nn.Module, log: list) -> None:
    parent, child = Node(batch()), Node(batch())
    parent.children.append(child)
    child.parent = weakref.ref(parent)  # this reference does not keep the parent alive
    assert parent.children[0].parent() is parent


# --8<-- [end:cycle]


def leak(body: Body, collect: bool = False) -> int:
    """Bytes left after ten steps. The collector is off, as between two of its runs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H))
    log: list = []
    gc.collect()
    gc.disable()
    before = live_bytes()
    for _ in range(STEPS):
        body(model, log)
    if collect:
        gc.collect()
    left = live_bytes() - before
    gc.enable()
    return left


def main() -> None:
    unit = TOKENS * H * 4
    calls = iter(range(10**6))
    rows: list[tuple[str, Body, Body]] = [
        ("loss kept with its graph", loss_with_graph, loss_as_number),
        ("exception kept", error_kept, error_as_text),
        ("forward hook left in place", hook_left, hook_removed),
        ("unbounded cache", lambda *_: mask(next(calls)), lambda *_: bounded_mask(next(calls))),
        ("reference cycle", cycle, no_cycle),
    ]
    print(f"after {STEPS} steps, in units of one activation ({unit // 1024} KiB)")
    print(f"{'':29}leaked   fixed")
    for name, wrong, right in rows:
        bad, good = leak(wrong) / unit, leak(right) / unit
        assert bad >= STEPS and good == (name == "unbounded cache"), (name, bad, good)
        print(f"{name:29}{bad:6.0f}{good:9.0f}")
    assert bounded_mask.cache_info().misses == STEPS  # a different argument in each step
    collected = leak(cycle, collect=True)
    assert collected == 0
    print(f"{'reference cycle, gc.collect()':29}{collected:6.0f}")


if __name__ == "__main__":
    main()
