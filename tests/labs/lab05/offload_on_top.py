"""Step 6: offload_optimizer at the top"""

STEP, HINT = 6, "offload_block"


def offloaded(config, device):
    block = {"device": "cpu", "pin_memory": device.type != "cpu"}
    return config | {"offload_optimizer": block, "zero_force_ds_cpu_optimizer": False}
