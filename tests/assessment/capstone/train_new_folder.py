"""The run wants a folder that is not there yet, in every life."""

STEP, HINT = 10, "not_recovered"

INSTEAD = {
    """
    mesh = make_mesh(config, device.type)
""": """
    if dist.get_rank() == 0:
        Path(config.folder).mkdir()
    mesh = make_mesh(config, device.type)
"""
}
