#!/bin/bash
# One torchrun on each host of a list, started by ssh: HOSTS="a b" bash ssh/by_ssh.sh OPTIONS.
# RSH=ssh/here.sh rehearses it: each "host" is then a process of this machine.
set -u
hosts=(${HOSTS:?name the hosts: HOSTS="a b" bash ssh/by_ssh.sh})
first=${MASTER_ADDR:-${hosts[0]}}    # an address that every host can reach: that of the first
port=${MASTER_PORT:-$((20000 + $$ % 10000))} # another for each job
rsh=${RSH:-ssh -tt}                  # a terminal (-tt): when ssh ends, the far side is hung up on

agents=()
for node in "${!hosts[@]}"; do
    # one string, for ssh hands its words to a shell on the other side; \$ would be read there
    $rsh "${hosts[node]}" "cd $PWD && OMP_NUM_THREADS=1 exec torchrun \
        --nnodes=${#hosts[@]} --node-rank=$node --nproc-per-node=${RANKS:-2} \
        --master-addr=$first --master-port=$port train.py $*" </dev/null &
    agents+=($!)
done
trap 'kill -TERM "${agents[@]}" 2>/dev/null' TERM INT HUP

status=''
for _ in "${agents[@]}"; do  # one that fails, wherever it is in the list, ends the others
    wait -n || { : "${status:=$?}"; kill -TERM "${agents[@]}" 2>/dev/null; }
done
wait
exit "${status:-0}"
