#!/usr/bin/env bash
# pod.sh IMAGE USER COMMAND…: the command as a pod of Kubernetes would run it, with the folder IMAGE as the image's /opt/clickline.
# Its root is read-only, /tmp and /dev/shm are its own and empty, so are network and processes; USER is a number without a
# name, with no capabilities. All of it is gone when the command ends.
set -euo pipefail

if [ -z "${POD:-}" ]; then
    POD=inside exec unshare --mount --net --pid --fork --kill-child --mount-proc bash "$0" "$@"
fi
image=$1 user=$2
shift 2
ip link set lo up
mount --make-rprivate /
mount --bind "$image" /mnt
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir -p "$image"
mount --bind /mnt "$image"
for mounted in / "$image" /mnt; do mount -o remount,bind,ro "$mounted"; done
mkdir -m 0777 /tmp/scratch /tmp/clickline
cd /tmp/clickline
exec setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all \
    env -i PATH="$image/venv/bin:/usr/local/bin:/usr/bin:/bin" \
    CLICKLINE_KERNELS="$image/kernels" NUMBA_CPU_NAME=x86-64-v3 NUMBA_CPU_FEATURES= PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp/scratch USER=clickline NUMBA_CACHE_DIR=/tmp/scratch/kernels RAY_AUTH_MODE=token \
    RAY_AUTH_TOKEN_PATH=/tmp/clickline/.clickline/ray-token RAY_USAGE_STATS_ENABLED=0 \
    "$@"
