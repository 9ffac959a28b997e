"""Step 6: the parameters in place of the optimizer"""

STEP, HINT = 6, "offload_what"


def offloaded(config, device):
    block = {"device": "cpu", "pin_memory": device.type != "cpu"}
    zero = config["zero_optimization"] | {"offload_param": block}
    return config | {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
