#!/usr/bin/env bash
# Runs all tests that need CUDA, the profiles of three recipes and all benchmarks, in under eight minutes, and writes
# what they say to a folder.
#
#   scripts/gpu_suite.sh [FOLDER]
#
# FOLDER ($OUT, or results-gpu, if it is left out) gets environment.json, tests.txt, profile.txt (of the first recipe
# as JSON, of the others as tables), profile.html of the first recipe, and for each scripts/bench_*.py a table and a
# JSON file of its name. Nothing is installed if the Python there has all that is needed (PYTHON, or the
# .venv of make test, or python3); WHEELS names a folder of wheels for what it lacks, for machines without a network.
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

echo "== tests marked cuda"
timeout "$(left)" "$python" -m pytest -m cuda -p no:cacheprovider -q 2>&1 | tee "$out/tests.txt"
code=${PIPESTATUS[0]}
# 5: no test was collected, which is no failure of the code under test.
[ "$code" -eq 0 ] || [ "$code" -eq 5 ] || failed=1

# A benchmark takes --output FILE.json, prints a table, and ends by itself within a minute or two.
for benchmark in scripts/bench_*.py; do
  [ -e "$benchmark" ] || continue
  name=$(basename "$benchmark" .py)
  if [ "$(left)" -lt 20 ]; then
    echo "gpu_suite: no time left for $name" | tee "$out/$name.txt"
    failed=1
    continue
  fi
  echo "== $name"
  timeout "$(left)" "$python" "$benchmark" --device cuda --output "$out/$name.json" 2>&1 | tee "$out/$name.txt"
  [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
done

# profile NAME ARGUMENT...: adds what econmt profile says of a recipe to profile.txt.
profile() {
  local name=$1 limit
  limit=$(left)
  if [ "$limit" -lt 20 ]; then
    echo "gpu_suite: no time left for the profile of $name" | tee -a "$out/profile.txt"
    failed=1
    return
  fi
  echo "== profile $name" | tee -a "$out/profile.txt"
  timeout "$((limit < 120 ? limit : 120))" \
    "$python" -m econmt --debug profile "$@" --device cuda --compare >> "$out/profile.txt" 2>&1
  local code=$?
  if [ "$code" -ne 0 ]; then
    echo "gpu_suite: the profile of $name failed with code $code" | tee -a "$out/profile.txt"
    tail -n 5 "$out/profile.txt"
    failed=1
  fi
}

: > "$out/profile.txt"
profile iwslt --bucket 100x100 --html "$out/profile.html" --json
profile groundhog
profile best

echo "gpu_suite: $SECONDS s, results in $out"
exit $failed
