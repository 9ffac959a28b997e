"""Step 6: zero_force_ds_cpu_optimizer inside of zero_optimization"""

STEP, HINT = 6, "force_cpu_adam"


def offloaded(config, device):
    block = {"device": "cpu", "pin_memory": device.type != "cpu"}
    zero = config["zero_optimization"] | {
        "offload_optimizer": block,
        "zero_force_ds_cpu_optimizer": False,
    }
    return config | {"zero_optimization": zero}
