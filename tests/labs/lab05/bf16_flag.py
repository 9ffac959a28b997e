"""Step 4: a flag in place of a block"""

STEP, HINT = 4, "bf16_block"


def in_bf16(config, fp32_sum=False):
    new = config | {"bf16": True}
    if fp32_sum:
        new["data_types"] = {"grad_accum_dtype": "fp32"}
    return new
