"""Step 4: grad_accum_dtype at the top"""

STEP, HINT = 4, "sum_key"


def in_bf16(config, fp32_sum=False):
    new = config | {"bf16": {"enabled": True}}
    if fp32_sum:
        new["grad_accum_dtype"] = "fp32"
    return new
