"""dp outermost."""

STEP, HINT = 2, "mesh_names"


def make_mesh(config: Config, device_type: str) -> DeviceMesh:
    """Lay the ranks out as pp × dp × tp; ranks of one tp group are neighbours."""
    sizes = (config.dp, config.pp, config.tp)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("dp", "pp", "tp"))
