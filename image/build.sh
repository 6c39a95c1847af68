#!/usr/bin/env bash
# What the image is made of. The Dockerfile calls it, and it runs as well without any container engine:
#
#   image/build.sh install PREFIX           a Python environment with Clickline and all that its roles need
#   image/build.sh kernels PREFIX KERNELS   the Numba kernels, compiled by running small pipelines with PREFIX
#
# PREFIX must be the path it will be run from: scripts contain it.
#   PYTHON       the interpreter to begin with (python3.11)
#   TORCH_INDEX  the package index that has PyTorch's CPU builds; empty: wherever pip looks
#   CPU          for which CPU kernels are compiled, a name that LLVM knows (x86-64-v3, generic, znver4); where they run,
#                NUMBA_CPU_NAME must be the same and NUMBA_CPU_FEATURES empty. `host`: this machine's, with neither set
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
scratch=$(mktemp -d)
lookups=() settings=() project='' rows=''
trap 'end; rm -rf "$scratch"' EXIT

install() {
    local prefix=$1 packages
    local -a pip=("$prefix/bin/python" -m pip install --quiet --no-compile --no-cache-dir
        --disable-pip-version-check --constraint "$root/constraints.txt")
    "${PYTHON:-python3.11}" -m venv "$prefix"
    # Built from a copy: setuptools writes into the folder it builds from.
    mkdir "$scratch/source"
    cp -R "$root/src" "$root/pyproject.toml" "$root/README.md" "$root/LICENSE" "$scratch/source"
    # Alone, without what it depends on: its index has other versions of that than we test with.
    if [ -n "${TORCH_INDEX:-}" ]; then "${pip[@]}" --no-deps --index-url "$TORCH_INDEX" torch; fi
    # KubeRay calls the dashboard, its agent and `ray job`, which only ray[default] has.
    "${pip[@]}" "$scratch/source[client,cluster,gs,http,k8s,report,s3,serve,sign,studio,tracking,tracking-server,train,webhdfs]" 'ray[default]'

    # Java, headers, and tests that lie beside what they test: nothing here runs, compiles or imports them.
    packages=$("$prefix/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$prefix/bin/python" -m pip uninstall --quiet --yes pip
    (cd "$packages" && rm -rf numba/tests llvmlite/tests numpy/_core/include onnx/backend/test pyarrow/include \
        pyarrow/src pyarrow/tests ray/jars torch/include torch/test
        find torch/bin -type f ! -name torch_shm_manager -delete)
    find "$packages/numpy" -name tests -type d -prune -exec rm -rf {} +
    find "$prefix" -name __pycache__ -type d -prune -exec rm -rf {} +
    # By content, not by time: nobody who runs it can write here, so what a rounded time invalidates would never be back.
    "$prefix/bin/python" -m compileall -q -j 0 -x /py312_ --invalidation-mode unchecked-hash "$prefix/lib"
}

kernels() {
    local prefix=$1
    local -a ports
    case "$(uname -m):${CPU:=x86-64-v3}" in
    aarch64:x86-64*) echo "image/build.sh: this machine is no $CPU. Say CPU=generic." >&2 && exit 2 ;;
    *:host) unset NUMBA_CPU_NAME NUMBA_CPU_FEATURES ;;
    *) export NUMBA_CPU_NAME=$CPU NUMBA_CPU_FEATURES= ;;
    esac
    export PATH="$prefix/bin:$PATH" HOME="$scratch" NUMBA_CACHE_DIR=$2
    read -ra ports < <(python -c 'import socket
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(7)]
print(*(s.getsockname()[1] for s in held))')

    # Twice: of two processes that store a kernel at once one forgets the other's, and the second time finds it missing.
    for _ in first second; do
        compile
        echo "image/build.sh: $(find "$NUMBA_CACHE_DIR" -name '*.nbc' | wc -l) kernels for $CPU"
    done
    # Whoever runs it, whatever the umask here.
    chmod -R a+rX "$NUMBA_CACHE_DIR"
}

# Each way from logs to answers that has kernels of its own, with as few rows as it takes.
compile() {
    begin criteo criteo tsv train.mode=cluster train.embedding_servers=2 train.workers.max=2
    run 'up --no-serve'

    begin criteo criteo tsv
    run 'up --no-serve'
    answer
    lookup 0
    lookup 1
    settings+=("serve.lookup.shards=[['127.0.0.1:${ports[3]}'],['127.0.0.1:${ports[5]}']]" serve.lookup.cache_rows=100)
    answer

    begin slots slots txt train.calibration.method=platt publish.table_precision=fp16
    answer
    begin paddlerec slots txt data.format=paddlerec
    run prepare
    begin csv csv csv train.calibration.method=isotonic train.admission.min_impressions=2 train.eviction.threshold=0.2 \
        train.eviction.decay=0.9 publish.table_precision=int8 'data.fields.C2={kind: slot, separator: "|"}'
    answer

    # Hour by hour: the second version is what has changed since the first.
    begin criteo criteo tsv 'data.train=data/{date}/{hour}/part-*' data.eval=null data.dates.from=20260101/00
    clickline sample --quiet --format criteo --rows 30000 --hours 3 --out "$project/data"
    run 'up --follow --detach --wait'
    timeout 300 bash -c "until clickline versions show 2 -c '$project/clickline.yaml' >'$scratch/said' 2>&1; do sleep 1; done"
    predict grpc
    end
}

# begin FORMAT PRESET ENDING SETTING…: a project of its own, and logs.
begin() {
    end
    project="$scratch/project"
    rows="$project/data/eval.$3"
    settings=(gate.auc=null 'model.hidden=[32]' model.embedding_dim=4 serve.processes=1 "serve.http_port=${ports[0]}"
        "serve.grpc_port=${ports[1]}" "serve.metrics_port=${ports[2]}" "${@:4}")
    clickline init "$project" --preset "$2"
    clickline sample --quiet --format "$1" --rows 20000 --out "$project/data"
}

# run COMMAND: with the project's config and settings.
run() {
    local -a sets=("${settings[@]/#/--set=}")
    # shellcheck disable=SC2086  # a command and its options
    clickline $1 --quiet -c "$project/clickline.yaml" "${sets[@]}"
}

lookup() {
    clickline lookup --shard "$1" --port "${ports[3 + 2 * $1]}" -c "$project/clickline.yaml" \
        --set "serve.metrics_port=${ports[4 + 2 * $1]}" &
    lookups+=($!)
}

answer() {
    run 'up --detach --wait'
    local protocol
    for protocol in grpc http v2-grpc v2-http elasticctr; do predict "$protocol"; done
    clickline down -c "$project/clickline.yaml"
}

predict() {
    run "predict --protocol $1 --iterations 2 --warmup 0 --input $rows"
}

end() {
    if [ ${#lookups[@]} -gt 0 ]; then
        kill "${lookups[@]}"
        wait "${lookups[@]}" || true
    fi
    if [ -n "$project" ]; then clickline down -c "$project/clickline.yaml"; fi
    lookups=() settings=() project='' rows=''
    rm -rf "$scratch/project"
}

case "${1:-}:$#" in
install:2) install "$2" ;;
kernels:3) kernels "$2" "$3" ;;
*) echo "usage: image/build.sh install PREFIX | kernels PREFIX KERNELS" >&2 && exit 2 ;;
esac
