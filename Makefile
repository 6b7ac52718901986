# make install      installs econmt and its server in .venv
# make quickstart   installs econmt and trains a small translation model in a few minutes
# make test         installs the test extras and runs every check but the long tests
# make test-all     the long ones, too
# make test-scripts the tests of scripts/, which make test leaves out
# make docs         builds the documentation site in build/docs
# make reference    writes the pages of recipe keys and commands anew
# make web          compiles the C library for browsers anew; needs the extra web
# make wheels       builds the runtime for all systems in dist; needs the extra web
# make environments installs in other Pythons, with the lowest and newest versions, without a compiler, and tries each
#
# They make an environment in .venv the first time. To use another one:
#   make test VENV=/path/to/venv         a virtual environment, made if it is missing
#   make test VENV=none PYTHON=python3   that Python itself, no virtual environment
# A torch that is already there is kept, whatever its version.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
MARKS ?= not slow and not thorough

ifeq ($(VENV),none)
  python := $(PYTHON)
  state := build/make
else
  python := $(VENV)/bin/python
  state := $(VENV)/make
endif

# A worker a core with one thread is quicker than fewer with more threads: most tests are too small for threads.
# What is compiled is kept, whatever the shell says: the next run, and each of a hundred processes, need not do it again.
pytest = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(python) -m pytest -n auto --maxprocesses 8 --dist worksteal --durations 30

.PHONY: install quickstart test test-all test-scripts thorough lint format type unit slow reference docs web wheels environments clean

install: $(state)/serving

quickstart: $(state)/installed
	@start=$$(date +%s); \
	$(python) -m econmt train recipes/quickstart.yaml && \
	echo "quickstart took $$(($$(date +%s) - start)) s"

test: lint type unit

test-all: test slow

lint: $(state)/tested
	$(python) -m ruff check .
	$(python) -m ruff format --check .

format: $(state)/tested
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

type: $(state)/tested
	$(python) -m mypy

unit: $(state)/tested
	$(pytest) -m "$(MARKS)" $(PYTEST_ARGS)

slow: $(state)/tested
	$(pytest) -m "slow and not thorough" $(PYTEST_ARGS)

thorough: $(state)/tested
	$(pytest) -m thorough $(PYTEST_ARGS)

test-scripts: $(state)/tested
	$(pytest) -m "not thorough" scripts/tests $(PYTEST_ARGS)

environments: $(state)/installed
	$(python) tests/installed/environments.py

# The pages that are generated: recipe keys and commands.
reference: $(state)/installed
	$(python) -m scripts.make_recipe_reference
	$(python) -m scripts.make_command_reference

# The C library for browsers. The flags say which instructions it may use, and that it has no part of a system.
WASM ?= runtime/econmt_runtime/web/econmt.wasm
wasm_calls = size start product_int8 products_by_owner layer_sequence best_words search_step
web:
	$(python) -m ziglang cc -target wasm32-wasi -mexec-model=reactor -mcpu=generic+simd128+bulk_memory -Wno-pass-failed \
	  $$($(python) -c "import runpy; print(*runpy.run_path('ops/econmt_ops/backends/c/platforms.py')['FLAGS'])") \
	  -Wl,--strip-all -Wl,--gc-sections -Wl,-z,stack-size=262144 $(wasm_calls:%=-Wl,--export=econmt_%) \
	  ops/econmt_ops/backends/c/kernels.c -o $(WASM)

# The runtime for the systems of platforms.py.
PLATFORMS ?= linux-x86_64 linux-aarch64 darwin-arm64 darwin-x86_64 windows-amd64
wheels: $(PLATFORMS:%=wheel-%)
wheel-%:
	ECONMT_PLATFORM=$* $(python) -m pip wheel -q --no-deps --no-build-isolation -w dist ./runtime

# The documentation site; a broken link or anchor is an error.
docs: reference $(state)/documented
	$(python) -m sphinx --fail-on-warning --keep-going --quiet -b html -c docs . build/docs
	@echo "open build/docs/index.html"

clean:
	rm -rf .venv build dist econmt.egg-info */build */*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis \
	  ops/econmt_ops/backends/c/*.so runtime/econmt_runtime/*.so

# What installing reads, the C library's sources among it: an edit of them builds it again.
sources := pyproject.toml setup.py ops/setup.py $(wildcard ops/econmt_ops/backends/c/*.[ch])

# pip does not show what it did not build, so this says it.
say_built = @$(python) -c "from econmt_ops.backends import c; c.is_built() or print('econmt is installed \
without its C library, so training on the CPU will be slower; to build it, install gcc or set CC, then: touch setup.py')"

# What was installed is remembered by these stamps, so that a second run starts at once.
$(state)/installed: $(state)/constraints.txt $(sources)
	$(python) -m pip install --constraint $(state)/constraints.txt --editable .
	$(say_built)
	@touch $@

$(state)/serving: $(state)/installed
	$(python) -m pip install --constraint $(state)/constraints.txt --editable '.[serve]'
	@touch $@

# Triton comes with a torch for CUDA, in the version that it needs; else the tests take the one that they ran with.
$(state)/tested: $(state)/installed
	@$(python) -c 'import importlib.metadata as m, sys; sys.exit("triton" in str(m.requires("torch")))' && \
	grep '^triton==' constraints.txt > $(state)/triton.txt || : > $(state)/triton.txt
	$(python) -m pip install --constraint $(state)/constraints.txt --constraint $(state)/triton.txt --editable '.[test]'
	@touch $@

$(state)/documented: $(state)/installed
	$(python) -m pip install --constraint $(state)/constraints.txt --editable '.[docs]'
	@touch $@

# The tested versions, but for a torch that is there already.
$(state)/constraints.txt: constraints.txt | $(state)
	@torch=$$($(python) -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' 2>/dev/null); \
	sed "s/^torch==.*/$${torch:-&}/; /^triton==/d" constraints.txt > $@

$(state):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	{ echo "econmt needs Python 3.10 or newer; name one: make PYTHON=python3.12"; exit 1; }
ifneq ($(VENV),none)
	@test -x $(python) || $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	{ echo "$(PYTHON) cannot make virtual environments; install its venv package" \
	"(Debian and Ubuntu: apt-get install python3-venv)"; exit 1; }
	@test -x $(python) || $(PYTHON) -m venv $(VENV)
endif
	@mkdir -p $@
