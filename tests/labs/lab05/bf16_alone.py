"""Step 4: only the new keys"""

STEP, HINT = 4, "config_lost"


def in_bf16(config, fp32_sum=False):
    new = {"bf16": {"enabled": True}}
    if fp32_sum:
        new["data_types"] = {"grad_accum_dtype": "fp32"}
    return new
