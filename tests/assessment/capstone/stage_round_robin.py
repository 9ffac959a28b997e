"""Every other layer."""

STEP, HINT = 6, "stage_layers"


def layers_of_stage(config, stage):
    return range(stage, config.layers, config.pp)
