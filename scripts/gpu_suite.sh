#!/usr/bin/env bash
# Runs all tests that need CUDA, then the benchmarks of speed (LSTM schedules with cuDNN beside them, low ranks, layouts,
# what auto chooses, training), the benchmark of memory and the profiles of three recipes: all in one call of under nine
# and a half minutes. What it says and measures goes to a folder.
#
#   scripts/gpu_suite.sh [FOLDER]
#
# FOLDER ($OUT, or results-gpu, if it is left out) gets eight files:
#   environment.json             the GPU, versions and commit
#   tests.txt                    what pytest says
#   bench_speed.txt and .csv     the tables of econmt bench lstm, low-rank, layout, select and training; their rows, of
#                                which the column "bench" says whose they are. Each row is in the file once it is measured
#   bench_memory.txt and .json   scripts/bench_memory.py: steps of three recipes, the output layer, the largest batch
#   profile.txt                  econmt profile: the techniques on iwslt as JSON, then groundhog and best as tables
#   profile.html                 the page of the first
# What an earlier call left there is written over. Every command has a limit, at which it is interrupted and tells what it
# has until then, and none begins when the time is up; those that are wanted most come first. The code is 1 if a command
# failed or there was no time for it. Tests run in five processes where pytest-xdist is there. Choices are remembered in
# a folder of this call's own. Nothing is installed if the Python there has all that is needed (PYTHON, or the .venv of
# make test, or python3); WHEELS names a folder of wheels for what it lacks, for machines without a network.
set -uo pipefail
cd "$(dirname "$0")/.."

out=${1:-${OUT:-results-gpu}}
mkdir -p "$out"
out=$(cd "$out" && pwd)
deadline=$((SECONDS + 545))
python=${PYTHON:-$( [ -x .venv/bin/python ] && echo .venv/bin/python || echo python3 )}
# torch.compile in the process itself: its helpers can outlive a command, which then waits for them until its limit.
export TORCHINDUCTOR_COMPILE_THREADS=1
export PYTHONPATH="$PWD:$PWD/ops${PYTHONPATH:+:$PYTHONPATH}"
failed=0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export ECONMT_CACHE="$scratch/cache"

needed='torch numpy safetensors sentencepiece sacrebleu yaml pydantic typer rich matplotlib tensorboard num2words pytest hypothesis'
missing=$("$python" - $needed <<'EOF'
import importlib.util
import sys

print(" ".join(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
EOF
) || exit 1
if [ -n "$missing" ]; then
  if [ -z "${WHEELS:-}" ]; then
    echo "gpu_suite: $python lacks $missing; install them, or name a folder of wheels: WHEELS=FOLDER $0" >&2
    exit 1
  fi
  # Beside the environment, so that it and its torch stay as they are.
  "$python" -m pip install --quiet --no-index --no-deps --target "$scratch/packages" "$WHEELS"/*.whl || exit 1
  export PYTHONPATH="$PYTHONPATH:$scratch/packages"
fi

"$python" - "$out/environment.json" <<'EOF' || exit 1
import json
import platform
import subprocess
import sys

import torch

if not torch.cuda.is_available():
    sys.exit("gpu_suite: no CUDA device")
properties = torch.cuda.get_device_properties(0)
commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
found = {
    "gpu": properties.name,
    "gpu_memory_bytes": properties.total_memory,
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "python": platform.python_version(),
    "commit": commit or None,
}
with open(sys.argv[1], "w", encoding="utf-8") as file:
    json.dump(found, file, indent=1)
print(found)
EOF

left() { echo $((deadline - SECONDS)); }

# step NAME SECONDS COMMAND...: runs a command for at most so long and writes what it says to NAME.txt, line by line.
step() {
  local name=$1 limit=$2 code writer
  shift 2
  if [ "$(left)" -lt 20 ]; then
    echo "gpu_suite: no time left for $name" | tee -a "$out/$name.txt"
    failed=1
    return
  fi
  [ "$limit" -lt "$(left)" ] || limit=$(left)
  echo "== $name: $*"
  exec 3> >(tee -a "$out/$name.txt")
  writer=$!
  # An interrupt first, so that a benchmark can say what it has.
  PYTHONUNBUFFERED=1 timeout --signal=INT --kill-after=15 "$limit" "$@" >&3 2>&1 3>&-
  code=$?
  exec 3>&-
  # Until all is written; but not until a child that was left behind gives up its end of the pipe.
  timeout 3 tail --pid="$writer" -s 0.1 -f /dev/null
  # 5: no test was collected, which is no failure of the code under test.
  if [ "$code" -ne 0 ] && [ "$code" -ne 5 ]; then
    echo "gpu_suite: $name ended with code $code after $SECONDS s" | tee -a "$out/$name.txt"
    failed=1
  fi
}

# speed SECONDS ARGUMENT...: a benchmark of econmt bench.
speed() {
  local limit=$1
  shift
  step bench_speed "$limit" "$python" -m econmt --debug bench "$@" --device cuda --csv "$out/bench_speed.csv"
}

# profile SECONDS ARGUMENT...: what econmt profile says of a recipe.
profile() {
  local limit=$1
  shift
  step profile "$limit" "$python" -m econmt --debug profile "$@" --device cuda
}

: > "$out/tests.txt"
: > "$out/profile.txt"
: > "$out/bench_memory.txt"
: > "$out/bench_speed.txt"
rm -f "$out/bench_speed.csv" "$out/bench_memory.json" "$out/profile.html"
workers=()
if "$python" -c 'import xdist' 2> /dev/null; then
  workers=(-n 5)
fi
# The seconds in comments are those of an H200 with 16 cores in a good moment; in a bad one all takes half as long again.
step tests 150 "$python" -m pytest -m cuda -p no:cacheprovider -q ${workers[@]+"${workers[@]}"} # 67
speed 70 lstm --ablation                                                                       # 30
speed 20 layout --paper                                                                        # 10
speed 75 training iwslt groundhog best --length 50 --precision float32 --precision bfloat16 --seconds 1 # 50
speed 45 low-rank --batch 64 --rank 16 --rank 64 --seconds 1.5                                 # 25
speed 25 select iwslt                                                                          # 10
speed 60 select --grid --part 1/7 --limit 45                                                   # 55
# Without compiled variants, which take a minute to compile; the profile of iwslt has some.
step bench_memory 135 "$python" scripts/bench_memory.py --device cuda --limit 105 --seconds 4 \
  --output "$out/bench_memory.json" --variants reference "+ output" "+ attention" "all, gates" "all, cells" \
  "all, attention" "all, outputs" "checkpoint: attention" "checkpoint: step" "checkpoint: everything"
profile 120 iwslt --bucket 100x100 --html "$out/profile.html" --json --compare
profile 30 groundhog
profile 30 best

echo "gpu_suite: $SECONDS s, results in $out"
exit $failed
