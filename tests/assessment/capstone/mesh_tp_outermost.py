"""tp changes slowest."""

STEP, HINT = 2, "mesh_order"


def make_mesh(config, device_type):
    ranks = torch.arange(config.pp * config.dp * config.tp).view(config.tp, config.dp, -1)
    return DeviceMesh(device_type, ranks.permute(2, 1, 0), mesh_dim_names=("pp", "dp", "tp"))
