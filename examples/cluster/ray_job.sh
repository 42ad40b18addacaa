#!/bin/bash
# Hands a run to a Ray cluster that is up; its driver then runs on the head, and this shell follows its log.
#
#   examples/cluster/ray_job.sh [--dry_run] [CONFIG [FLAG VALUE]...]
#
#   --dry_run   print the command, and check the settings here
#   CONFIG      settings with cluster.enable (default examples/sums_cluster.yaml)
#
# RAY_ADDRESS     where the cluster takes jobs (default http://127.0.0.1:8265)
# RAY_AUTH_MODE   `token` if it wants one, which lies in ~/.ray/auth_token
#
# Nothing is copied to the cluster: this directory, the model and the data have the same path there as here.
set -eu

dry=
if [[ "${1-}" == --dry[_-]run ]]; then
    dry=yes
    shift
fi
config=${1-examples/sums_cluster.yaml}
shift $(($# > 0))

run=(rollgrad train rl --config "$config" --cluster.address auto "$@")
submit=(ray job submit --address "${RAY_ADDRESS-http://127.0.0.1:8265}" -- env -C "$PWD" "${run[@]}")

echo "+ ${submit[*]}"
if [ -n "$dry" ]; then
    exec "${run[@]}" --dry_run
fi
exec "${submit[@]}"
