"""Autocast's cache decides how often one weight is cast, and it can return an old cast.

A weight that is used six times in one autocast region is cast once, if it is a leaf that
requires a gradient. The cache is emptied when the outermost region ends.

Look at the rows with 6: there the cache is not used. The middle part changes a weight inside
the region, and the cache does not notice. The last part nests regions of different types.
"""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

H, USES = 64, 6
LOW = torch.bfloat16


class CountCasts(TorchDispatchMode):
    """Count casts of the weight, the only tensor of shape [H, H], and note the modes."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0
        self.modes: set[tuple[bool, bool, bool]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        casts = ("_to_copy", "to")  # in inference mode a cast is called "to"
        if func.overloadpacket.__name__ in casts and args[0].shape == (H, H):
            self.casts += 1
            modes = torch.is_autocast_cache_enabled(), torch.is_inference_mode_enabled()
            self.modes.add((*modes, args[0].requires_grad))
        return func(*args, **(kwargs or {}))


def use(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Apply a layer USES times, as in a model that shares its layers: [b, h] -> [b, h]."""
    for _ in range(USES):
        x = layer(x)
    return x


def report(
    case: str, count: CountCasts, cache: bool = True, inference: bool = False, grad: bool = True
) -> None:
    """Print the number of casts; check in which modes the casts of this case happened."""
    assert count.modes == {(cache, inference, grad)}, (case, count.modes)
    print(f"  {case + ':':30}{count.casts}")


def main() -> None:
    found = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if found else torch.device("cpu")
    kind = device.type
    torch.manual_seed(0)
    layer, x = nn.Linear(H, H).to(device), torch.randn(4, H, device=device)

    print(f"casts of one weight that is used {USES} times")
    with CountCasts() as count, torch.autocast(kind, LOW):
        use(layer, x)
    report("training", count)
    with CountCasts() as count, torch.autocast(kind, LOW, cache_enabled=False):
        use(layer, x)
    report("cache_enabled=False", count, cache=False)
    with CountCasts() as count, torch.no_grad(), torch.autocast(kind, LOW):
        assert not use(layer, x).requires_grad
    report("no_grad", count)
    with CountCasts() as count, torch.inference_mode(), torch.autocast(kind, LOW):
        use(layer, x)
    report("inference_mode", count, inference=True)
    with CountCasts() as count, torch.autocast(kind, LOW):
        frozen = layer.requires_grad_(False)
        use(frozen, x)
    layer.requires_grad_(True)
    report("frozen weight", count, grad=False)
    with CountCasts() as count, torch.autocast(kind, LOW):
        scaled = layer.weight * 2  # it requires a gradient, but it is not a leaf
        for _ in range(USES):
            nn.functional.linear(x, scaled)
    assert scaled.requires_grad and count.casts == USES
    with CountCasts() as count:
        for _ in range(USES):
            with torch.autocast(kind, LOW):
                x = layer(x)
    report("a region for each use", count)
    with CountCasts() as count, torch.autocast(kind, LOW):
        for _ in range(USES):
            with torch.autocast(kind, LOW):
                x = layer(x)
    report("nested in an outer region", count)

    print("the weight is doubled inside the region; the output must double")
    layer.bias.data.zero_()
    x = torch.randn(4, H, device=device)
    with torch.autocast(kind, LOW):
        before = layer(x)
        layer.weight.data.mul_(2)
        stale = layer(x)
        torch.clear_autocast_cache()
        fresh = layer(x)
    assert stale is not before and torch.equal(stale, before)
    assert torch.equal(fresh, 2 * before)
    print("  second forward:               equal to the first, from the cache")
    print("  after clear_autocast_cache(): doubled")

    print("types where regions nest")
    with torch.autocast(kind, LOW):
        print(f"  in bf16:                      {layer(x).dtype}")
        with torch.autocast(kind, enabled=False):
            print(f"  enabled=False:                {layer(x).dtype}")
        with torch.autocast(kind, torch.float16):
            try:
                layer(x)
            except RuntimeError as error:
                print(f"  fp16 inside bf16:             {type(error).__name__}: {error}")
            torch.clear_autocast_cache()
            print(f"  after clear_autocast_cache(): {layer(x).dtype}")


if __name__ == "__main__":
    main()
