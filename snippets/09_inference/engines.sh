#!/bin/bash
# The same requests to the book's server, to transformers serve and to vLLM: one model for all three.
# It needs what requirements/engines.txt says. vLLM has a Python of its own, which lies beside it.
set -eu
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 VLLM_NO_USAGE_STATS=1 OMP_NUM_THREADS=1
export VLLM_CPU_KVCACHE_SPACE=1 # GiB; both engines would take most of the machine's memory
vllm=$(dirname "$(command -v vllm)")/python
python serve.py --save tiny
python load.py --rate 20 \
    "python serve.py --port PORT" \
    "transformers serve tiny --continuous-batching --cb-num-blocks 64 --device cpu --port PORT" \
    "$vllm -m vllm.entrypoints.openai.api_server --model tiny --dtype float32 --enforce-eager
        --port PORT"
