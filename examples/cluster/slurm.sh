#!/bin/bash
#SBATCH --job-name=rollgrad
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#
# Starts Ray on the nodes of a SLURM job, and a run on the first of them.
#
#   sbatch examples/cluster/slurm.sh [CONFIG [FLAG VALUE]...]
#   examples/cluster/slurm.sh --dry_run [CONFIG [FLAG VALUE]...]
#
#   --dry_run   print the commands, and check the settings here
#   CONFIG      settings with cluster.enable (default examples/sums_cluster.yaml)
#
# Five minutes before the time limit, and on `scancel --batch --signal=USR1 JOB`, SLURM tells this script alone, which
# makes the run save its last finished step and end. Without --signal `scancel` ends Ray at the same moment: then the
# training states of --ckpt.state_minutes are what is left. Submitted again, the script continues the run. Eight nodes:
#
#   sbatch --nodes 8 --exclusive examples/cluster/slurm.sh run.yaml --actor.num_nodes 8
set -eu

dry=
if [[ "${1-}" == --dry[_-]run ]]; then
    dry=yes
    shift
fi
config=${1-examples/sums_cluster.yaml}
shift $(($# > 0))

head=$(hostname)
port=6379
others=$((${SLURM_JOB_NUM_NODES-1} - 1))
join=(srun --nodes "$others" --ntasks "$others" --exclude "$head" ray start --address "$head:$port" --block)
run=(rollgrad train rl --config "$config" --cluster.address auto --ckpt.resume auto "$@")

do_or_show() {
    echo "+ $*"
    [ -n "$dry" ] || "$@"
}

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT # SLURM ends the head's Ray: `ray stop` would end other jobs' too
export RAY_AUTH_MODE=token # without one, whoever reaches the nodes can run programs as you
do_or_show ray get-auth-token --generate >/dev/null # into ~/.ray, where all nodes find it
do_or_show ray start --head --port "$port"
if [ "$others" -gt 0 ]; then
    echo "+ ${join[*]} &"
    if [ -z "$dry" ]; then
        "${join[@]}" & # the run waits (cluster.timeout) until its processes have room
    fi
fi
echo "+ ${run[*]}"
if [ -n "$dry" ]; then
    "${run[@]}" --dry_run
    exit
fi
"${run[@]}" & # beside this shell, which otherwise heard of a signal only when the run is over
driver=$!
trap 'kill -TERM "$driver" 2>/dev/null || true' USR1 TERM
while kill -0 "$driver" 2>/dev/null; do
    wait "$driver" || true # ends early when a signal comes
done
wait "$driver" # whose exit status is the script's
