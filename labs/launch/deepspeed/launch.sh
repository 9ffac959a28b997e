#!/bin/bash
# DeepSpeed's launcher on two nodes without ssh: it is started once on each, with the same
# hostfile and the number of the node, as torchrun is. Here both nodes are this machine.
set -u
port=${MASTER_PORT:-$((20000 + $$ % 20000))}
for node in 0 1; do
    deepspeed --hostfile=deepspeed/hosts --no_ssh --node_rank=$node --quiet \
        --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="$port" train.py "$@" &
done
status=0
for node in 0 1; do wait -n || status=$?; done
exit $status
