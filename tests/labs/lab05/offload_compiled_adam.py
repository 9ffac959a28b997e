"""Step 6: DeepSpeed's compiled Adam is still demanded"""

STEP, HINT = 6, "force_cpu_adam"


def offloaded(config, device):
    block = {"device": "cpu", "pin_memory": device.type != "cpu"}
    zero = config["zero_optimization"] | {"offload_optimizer": block}
    return config | {"zero_optimization": zero}
