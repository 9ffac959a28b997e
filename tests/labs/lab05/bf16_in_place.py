"""Step 4: the argument is changed"""

STEP, HINT = 4, "config_changed"


def in_bf16(config, fp32_sum=False):
    new = config
    new["bf16"] = {"enabled": True}
    if fp32_sum:
        new["data_types"] = {"grad_accum_dtype": "fp32"}
    return new
