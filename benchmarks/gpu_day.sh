#!/usr/bin/env bash
# Runs the benchmarks and tests that need a CUDA device, most important first, in at most 12 minutes.
#
#   benchmarks/gpu_day.sh [FOLDER]     results and logs of the steps in FOLDER (build/gpu_day), a
#                                      summary in benchmarks/results/gpu-DEVICE_NAME.json
#
# Finished steps are not repeated, so run the same command again to continue after a stop, for
# example with the tests that had no time. The exit code is 1 while the results contain a failed step.
# Environment variables, with defaults: PYTHON with CUDA packages (python), MINUTES in total (12),
# SIZE of the benchmarks (small), DEVICE (cuda; use cpu to try the script without a GPU), RESULTS, the
# folder of the summary (benchmarks/results).
set -u
cd "$(dirname "$0")/.."
folder=${1:-build/gpu_day} python=${PYTHON:-python} size=${SIZE:-small} device=${DEVICE:-cuda}
results=${RESULTS:-benchmarks/results} ends=$((SECONDS + ${MINUTES:-12} * 60))
mkdir -p "$folder" || exit 1

# Test files that need a CUDA device, or use one if it exists.
cuda_tests() {
  local modules
  modules=$(grep -rl "testing.device" tests plugins/*/tests --include='*.py' |
    sed -E 's|^plugins/||; s|\.py$||; s|/([^/]*)$|( import \|[.])\1|; s|/|[.]|g' | paste -sd '|')
  grep -rlE "cuda.is_available|testing.device|($modules)\b" \
    tests plugins/*/tests --include='test_*.py' | sort
}

# step NAME SECONDS COMMAND...: COMMAND writes FOLDER/NAME.part, which is renamed to FOLDER/NAME.
step() {
  local name=$1 limit=$2 left=$((ends - SECONDS)) started=$SECONDS rc=0
  shift 2
  if [ -e "$folder/$name" ]; then
    if [ ! -e "$folder/$name.failed" ]; then echo "$name: done before"; return; fi
    echo "$name: failed before; remove $folder/$name to run it again"
    failed=1
    return
  fi
  if [ "$left" -lt 15 ]; then echo "$name: no time left"; failed=1; return; fi
  timeout "$((limit < left ? limit : left))" "$@" > "$folder/$name.log" 2>&1 || rc=$?
  # Failed tests are a result. A step without a result or out of time is tried again.
  if [ -e "$folder/$name.part" ] && [ "$rc" -lt 2 ]; then
    if [ "$rc" = 0 ]; then rm -f "$folder/$name.failed"; else touch "$folder/$name.failed"; fi
    mv "$folder/$name.part" "$folder/$name"
  fi
  [ "$rc" = 0 ] || failed=1
  echo "$name: exit $rc after $((SECONDS - started)) s"
}

failed=0 xdist=
"$python" -c 'import xdist' 2> /dev/null && xdist="-n 4"
gpu=$(uname -m)
if [ "$device" = cuda ]; then
  gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name())') || exit 1
fi

# recd NAME SECONDS COMMAND...: a step of the recd command.
recd() {
  step "$1.json" "$2" "$python" -c 'from recd_plugins.cli import main; main()' "${@:3}" \
    --json "$folder/$1.json.part"
}
# demo NAME BATCH_SIZE EMBEDDING_DIM ROWS
demo() {
  recd "$1" 120 run registry.yaml --ranks 1 --compare training.device="$device" \
    training.batch_size="$2" model.embedding_dim="$3" dataset.options.generate.rows="$4" \
    dataset.options.path="$folder/papercal-$4"
}
# bench NAME SECONDS BENCHMARK [OPTIONS]
bench() {
  step "$1.json" "$2" "$python" -m benchmarks "${@:3}" --device "$device" --size "$size" \
    --json "$folder/$1.json.part"
}

bench host 120 host
demo demo-512x16 512 16 32768
demo demo-4096x64 4096 64 131072
bench rm1 120 ablation --only rm1
bench dlrm 90 dlrm --only dlrm
bench scars 180 scars
recd cluster 60 calibrate --ranks 1 --device "$device" --force -o "$folder/cluster.yaml"
for file in $(cuda_tests); do
  name=tests-$(echo "${file%.py}" | tr / -).xml
  step "$name" 300 env RECD_TEST_DEVICE="$device" RECD_DAY=all "$python" -m pytest -q -p no:cacheprovider $xdist "$file" \
    --junitxml "$folder/$name.part" -o junit_family=xunit2
done

"$python" - "$gpu" "$folder" "$results" <<'PY'
import json, re, sys
from pathlib import Path
from xml.etree import ElementTree
gpu, folder, results = sys.argv[1], *map(Path, sys.argv[2:])
suites = {p.stem: next(ElementTree.parse(p).iter("testsuite")) for p in sorted(folder.glob("tests-*.xml"))}
tests = {name: {key: int(suite.get(key, 0)) for key in ("tests", "skipped", "failures", "errors")}
         for name, suite in suites.items()}
benches = {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json")) if p.stem != "cluster"}
results.mkdir(parents=True, exist_ok=True)
summary = results / f"gpu-{re.sub('[^A-Za-z0-9]+', '-', gpu)}.json"
summary.write_text(json.dumps({"device": gpu, "tests": tests, "benchmarks": benches}, indent=1))
print(gpu, "tests:", tests, "benchmarks:", ", ".join(benches) or "none")
PY
exit "$failed"
