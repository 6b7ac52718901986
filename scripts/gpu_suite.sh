#!/usr/bin/env bash
# Everything that needs a GPU, in one call of under twenty minutes: the tests marked cuda, compute-sanitizer over small
# cases, the kernels alone, whole training steps, the profile of iwslt by classes of kernels, training multi30k, what auto
# chooses, layouts in graphs, and as many thorough variants of tests as there is time for. What it says and measures goes
# to a folder.
#
#   scripts/gpu_suite.sh [FOLDER]
#   ECONMT_DATA=DATA scripts/gpu_suite.sh [FOLDER]     # with DATA/multi30k; without it nothing is trained
#
# FOLDER ($OUT, or results-gpu, if it is left out) gets eight files:
#   seconds.txt        how long each command took
#   environment.json   the GPU, versions and commit
#   tests.txt          what pytest and compute-sanitizer say
#   kernels.txt        recurrent and gpu.{attention,output} of scripts.bench: a thousand equal repetitions, errors, times
#   speed.txt          gpu.{step,search} of scripts.bench, econmt profile, train, bench select and layout, as tables
#   steps.json         the rows of gpu.step, with machine, versions and commit
#   choices.csv        the rows of econmt bench, of which the column "bench" says whose they are
#   profile.html       the page of the profile
# What an earlier call left there is written over. SUITE_SECONDS is how long all may take (1150). Every command has a
# limit, at which it is interrupted and tells what it has until then, and none begins when the time is up; those that
# are wanted most come first. The code is 1 if a command failed or there was no time for it. Tests run in as many
# processes as there are cores but two where pytest-xdist is there, and beside them compute-sanitizer, which is left
# out, and that said, where it is missing. Choices are remembered in a folder of this call's own. Nothing is installed
# if the Python there has all that is needed (PYTHON, or the .venv of make test, or python3); WHEELS names a folder of
# wheels for what it lacks, for machines without a network.
set -uo pipefail
cd "$(dirname "$0")/.."

out=${1:-${OUT:-results-gpu}}
mkdir -p "$out"
out=$(cd "$out" && pwd)
deadline=$((SECONDS + ${SUITE_SECONDS:-1150}))
python=${PYTHON:-$( [ -x .venv/bin/python ] && echo .venv/bin/python || echo python3 )}
# torch.compile in the process itself: its helpers can outlive a command, which then waits for them until its limit.
export TORCHINDUCTOR_COMPILE_THREADS=1
export PYTHONPATH="$PWD:$PWD/ops:$PWD/memory:$PWD/runtime${PYTHONPATH:+:$PYTHONPATH}"
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
  local name=$1 limit=$2 code writer began
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
  began=$SECONDS
  # An interrupt first, so that a benchmark can say what it has.
  PYTHONUNBUFFERED=1 timeout --signal=INT --kill-after=15 "$limit" "$@" >&3 2>&1 3>&-
  code=$?
  exec 3>&-
  # Until all is written; but not until a child that was left behind gives up its end of the pipe.
  timeout 3 tail --pid="$writer" -s 0.1 -f /dev/null
  echo "gpu_suite: $((SECONDS - began)) s for $*" | tee -a "$out/seconds.txt"
  # 5: no test was collected, which is no failure of the code under test.
  if [ "$code" -ne 0 ] && [ "$code" -ne 5 ]; then
    echo "gpu_suite: $name ended with code $code after $SECONDS s" | tee -a "$out/$name.txt"
    failed=1
  fi
}

# econmt ARGUMENT...: the tables that a command prints go to speed.txt.
econmt() {
  local limit=$1
  shift
  step speed "$limit" "$python" -m econmt --debug "$@"
}

# sanitize SECONDS TOOL FILE...: compute-sanitizer over the small cases of tests of kernels. Those of persistent kernels
# are left out: their programs wait for each other, with a limit, and under a tool all are a hundred times slower.
sanitize() {
  local limit=$1 tool=$2
  shift 2
  # Without a cache of blocks every tensor is an allocation of its own, of which the tool knows the end.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 step tests "$limit" compute-sanitizer --tool "$tool" --error-exitcode 9 \
    --target-processes all "$python" -m pytest -q -p no:cacheprovider -p no:xdist "$@"
}

: > "$out/tests.txt"
: > "$out/kernels.txt"
: > "$out/speed.txt"
rm -f "$out/seconds.txt" "$out/steps.json" "$out/choices.csv" "$out/profile.html"
workers=()
if "$python" -c 'import xdist' 2> /dev/null; then
  # A test that compiles many kernels takes two minutes, so that those after it must not wait for its process.
  cores=$(env -u OMP_NUM_THREADS nproc) # which would be that variable where it is set
  workers=(-n "$((cores > 4 ? cores - 2 : 2))" --dist worksteal)
fi
tests() {
  local limit=$1 which=$2
  shift 2
  # One thread each: the processes would wait for each other's.
  step tests "$limit" env OMP_NUM_THREADS=1 "$python" -m pytest -m "$which" -p no:cacheprovider -q --durations 15 "$@"
}

# Nothing here is timed, so that it may run at the same time.
sanitized=
if command -v compute-sanitizer > /dev/null; then
  (
    for tool in memcheck racecheck; do
      sanitize 80 "$tool" tests/ops/triton/test_cells.py tests/ops/triton/test_attention.py \
        -k "reads or block or (gradients and 1-)"
    done
    exit "$failed"
  ) &
  sanitized=$!
else
  echo "gpu_suite: no compute-sanitizer on the PATH" | tee -a "$out/tests.txt"
fi
tests 600 "cuda and not alone and not thorough" ${workers[@]+"${workers[@]}"}
[ -z "$sanitized" ] || wait "$sanitized" || failed=1
tests 90 alone
step speed 90 "$python" -m scripts.bench gpu.step --only W1 W2 --variants auto --seconds 0.3 --json "$out/steps.json"
step kernels 60 "$python" -m scripts.bench recurrent flashrnn --device cuda --precision bfloat16
econmt 60 profile iwslt --bucket 100x100 --device cuda --html "$out/profile.html"
if [ -e "${ECONMT_DATA:-}/multi30k" ]; then
  # BLEU of the validation text, checkpoint by checkpoint, then of test2016.
  econmt 55 train multi30k "output=$scratch/multi30k" training.device=cuda training.max_seconds=30
  tee -a "$out/speed.txt" < "$scratch/multi30k/metrics.tsv"
else
  echo "gpu_suite: no multi30k in ECONMT_DATA (${ECONMT_DATA:-not set}), so nothing is trained" | tee -a "$out/speed.txt"
fi
step speed 35 "$python" -m scripts.bench gpu.search
step kernels 70 "$python" -m scripts.bench gpu.output output kernel optimizer dropout
step kernels 45 "$python" -m scripts.bench gpu.attention --positions 100
step speed 40 "$python" -m scripts.bench gpu.step --only GNMT --precision bfloat16 --variants auto --seconds 0.3
econmt 30 bench select iwslt --device cuda --csv "$out/choices.csv"
step speed 30 "$python" -m scripts.bench layout --graph --device cuda --csv "$out/choices.csv"
if [ "$(left)" -ge 25 ]; then
  # An interrupt here is no failure: what is left out is variants of tests that ran.
  before=$failed
  tests "$(left)" "cuda and not alone and thorough" ${workers[@]+"${workers[@]}"}
  grep -q "^FAILED\|^ERROR" "$out/tests.txt" || failed=$before
fi
echo "gpu_suite: $SECONDS s, results in $out"
exit $failed
