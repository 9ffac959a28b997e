#!/bin/bash
# Starts one torchrun on each host of a list by ssh: HOSTS="a b" bash ssh/by_ssh.sh OPTIONS.
# With RSH="bash ssh/here.sh" each command runs on this machine, without a network.
set -u
hosts=(${HOSTS:?set HOSTS to the names of the hosts: HOSTS="a b" bash ssh/by_ssh.sh})
first=${MASTER_ADDR:-${hosts[0]}}    # an address of the first host that every host can reach
port=${MASTER_PORT:-$((20000 + $$ % 10000))} # a different port for each job
rsh=${RSH:-ssh -tt}                  # -tt: the remote side gets SIGHUP when ssh ends

agents=()
for node in "${!hosts[@]}"; do
    # ssh passes its arguments to a shell on the remote host, so this is one string
    $rsh "${hosts[node]}" "cd $PWD && OMP_NUM_THREADS=1 exec torchrun \
        --nnodes=${#hosts[@]} --node-rank=$node --nproc-per-node=${RANKS:-2} \
        --master-addr=$first --master-port=$port train.py $*" </dev/null &
    agents+=($!)
done
trap 'kill -TERM "${agents[@]}" 2>/dev/null' TERM INT HUP

status=''
for _ in "${agents[@]}"; do  # if one agent fails, end the others
    wait -n || { : "${status:=$?}"; kill -TERM "${agents[@]}" 2>/dev/null; }
done
wait
exit "${status:-0}"
