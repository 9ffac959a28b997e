#!/bin/bash
# DeepSpeed's launcher on two nodes without ssh: it is started once on each, with the same
# hostfile and the number of the node, as torchrun is. Here both nodes are this machine.
set -um  # m: each launcher leads a process group, which a signal reaches whole
port=${MASTER_PORT:-$((20000 + $$ % 10000))}  # below the ports that a machine hands out itself
groups=()
for node in 0 1; do
    deepspeed --hostfile=deepspeed/hosts --no_ssh --node_rank=$node --quiet \
        --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="$port" train.py "$@" &
    groups+=(-$!)
done
trap 'kill -TERM -- "${groups[@]}" 2>/dev/null' TERM INT HUP

status=''
for _ in 0 1; do  # a node that fails ends the other, which would wait for it for half an hour
    wait -n || { : "${status:=$?}"; kill -TERM -- "${groups[@]}" 2>/dev/null; }
done
wait
exit "${status:-0}"
