"""The sum goes whole to every rank."""

STEP, HINT = 3, "tp_layouts"


def cut(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut a block, an embedding or a head over the tp dimension, in place.

    Between the blocks each rank has its share of the positions: [b, s / tp, h].
    """
    if mesh["tp"].size() == 1:
        return module
    layouts = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    gathered = PrepareModuleInput(**layouts)
    if isinstance(module, Block):
        plan = {"attention": gathered, "mlp": gathered}
        plan |= {name: SequenceParallel() for name in ("norm1", "norm2")}
        columns, rows = [f"attention.{name}" for name in "qkv"], ["attention.out", "mlp.down"]
        plan |= {name: ColwiseParallel() for name in (*columns, "mlp.up")}
        plan |= {name: RowwiseParallel() for name in rows}
    else:
        ends = {"input_layouts": Replicate(), "output_layouts": Shard(1)}
        plan = {"embedding": RowwiseParallel(**ends), "norm": SequenceParallel()}
        ends = {"input_layouts": Shard(1), "output_layouts": Replicate()}
        plan["head"] = ColwiseParallel(**ends)
        plan = {name: style for name, style in plan.items() if getattr(module, name)}
    return parallelize_module(module, mesh["tp"], plan)
