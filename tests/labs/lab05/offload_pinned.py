"""Step 6: pinned memory on a CPU"""

STEP, HINT = 6, "pinned"


def offloaded(config, device):
    block = {"device": "cpu", "pin_memory": True}
    zero = config["zero_optimization"] | {"offload_optimizer": block}
    return config | {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
