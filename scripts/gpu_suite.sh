#!/usr/bin/env bash
# Runs all tests that need CUDA, the profiles of three recipes and the benchmarks of memory and training, in under eight
# minutes, and writes what they say to a folder.
#
#   scripts/gpu_suite.sh [FOLDER]
#
# FOLDER ($OUT, or results-gpu, if it is left out) gets environment.json, tests.txt, profile.txt (of the first recipe
# as JSON, of the others as tables), profile.html of the first recipe, bench_memory.txt and .json, bench_training.txt
# and .csv. Tests run in four processes where pytest-xdist is there. Nothing is installed if the Python there has all
# that is needed (PYTHON, or the .venv of make test, or python3); WHEELS names a folder of wheels for what it lacks, for
# machines without a network.
set -uo pipefail
cd "$(dirname "$0")/.."

out=${1:-${OUT:-results-gpu}}
mkdir -p "$out"
out=$(cd "$out" && pwd)
deadline=$((SECONDS + 470))
python=${PYTHON:-$( [ -x .venv/bin/python ] && echo .venv/bin/python || echo python3 )}
export PYTHONPATH="$PWD:$PWD/ops${PYTHONPATH:+:$PYTHONPATH}"
failed=0

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
  packages=$(mktemp -d)
  trap 'rm -rf "$packages"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --target "$packages" "$WHEELS"/*.whl || exit 1
  export PYTHONPATH="$PYTHONPATH:$packages"
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
  local name=$1 limit=$2 code
  shift 2
  if [ "$(left)" -lt 20 ]; then
    echo "gpu_suite: no time left for $name" | tee -a "$out/$name.txt"
    failed=1
    return
  fi
  [ "$limit" -lt "$(left)" ] || limit=$(left)
  echo "== $name: $*"
  # An interrupt first, so that a benchmark can say what it has.
  PYTHONUNBUFFERED=1 timeout --signal=INT --kill-after=10 "$limit" "$@" 2>&1 | tee -a "$out/$name.txt"
  code=${PIPESTATUS[0]}
  # 5: no test was collected, which is no failure of the code under test.
  if [ "$code" -ne 0 ] && [ "$code" -ne 5 ]; then
    echo "gpu_suite: $name ended with code $code after $SECONDS s" | tee -a "$out/$name.txt"
    failed=1
  fi
}

# profile ARGUMENT...: what econmt profile says of a recipe.
profile() {
  step profile 90 "$python" -m econmt --debug profile "$@" --device cuda --compare
}

: > "$out/tests.txt"
: > "$out/profile.txt"
: > "$out/bench_memory.txt"
: > "$out/bench_training.txt"
workers=()
if "$python" -c 'import xdist' 2> /dev/null; then
  workers=(-n 4)
fi
step tests 240 "$python" -m pytest -m cuda -p no:cacheprovider -q ${workers[@]+"${workers[@]}"}
profile iwslt --bucket 100x100 --html "$out/profile.html" --json
step bench_memory 190 "$python" scripts/bench_memory.py --device cuda --limit 150 --output "$out/bench_memory.json"
# A row is written to the file as soon as it is measured.
step bench_training 80 "$python" -m econmt bench training iwslt groundhog best --length 50 --precision float32 \
  --precision bfloat16 --seconds 1 --device cuda --csv "$out/bench_training.csv"
profile groundhog
profile best

echo "gpu_suite: $SECONDS s, results in $out"
exit $failed
