#!/bin/bash
# Starts DeepSpeed's launcher once for each of two nodes, without ssh. The hostfile is the same
# on all nodes, and --node_rank is the number of the node. Here both nodes are this machine.
set -um  # -m: each launcher gets its own process group, which can be signalled as a whole
port=${MASTER_PORT:-$((20000 + $$ % 10000))}  # below the range from which Linux assigns ports
groups=()
for node in 0 1; do
    deepspeed --hostfile=deepspeed/hosts --no_ssh --node_rank=$node --quiet \
        --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="$port" train.py "$@" &
    groups+=(-$!)
done
trap 'kill -TERM -- "${groups[@]}" 2>/dev/null' TERM INT HUP

status=''
for _ in 0 1; do  # if one node fails, end the other, which would wait for half an hour
    wait -n || { : "${status:=$?}"; kill -TERM -- "${groups[@]}" 2>/dev/null; }
done
wait
exit "${status:-0}"
