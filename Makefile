# make demo | test | lint. Each first creates the environment .venv where it is missing
# or older than what it is made from; `make help` lists the variables.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
TESTARGS ?=
JOBS ?= 2
# more than cores: engines and servers wait as much as they work
TEST_JOBS ?= 3
DEMOARGS ?=
SOAKARGS ?=
BENCHARGS ?=
VERSIONS ?=
MATRIXARGS ?=
SURVEYARGS ?=
MUTANTARGS ?=
WHEELARGS ?=

# torch's compiler and LD_PRELOAD take no path with a space: there, the environment goes elsewhere.
SPACE := $(subst ,, )
ELSEWHERE = $(HOME)/.cache/mmkit/$(shell printf %s "$(CURDIR)" | cksum | cut -d ' ' -f 1)
VENV ?= $(if $(findstring $(SPACE),$(CURDIR)),$(ELSEWHERE),.venv)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# vLLM on a CPU, offline, without telemetry.
export HF_HUB_OFFLINE ?= 1
export VLLM_CPU_KVCACHE_SPACE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
export DO_NOT_TRACK ?= 1
export TOKENIZERS_PARALLELISM ?= false
# what vLLM compiles lies with the environment that it belongs to, as in tests/conftest.py
export VLLM_CACHE_ROOT ?= $(abspath $(VENV))/cache/vllm
export TORCHINDUCTOR_CACHE_DIR ?= $(abspath $(VENV))/cache/inductor
# empty is unset: without bytecode each of the many processes of the tests compiles all of mmkit
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help venv openpi sglang demo serve-demo drive drive-demo vowels robot test test-fast test-thorough night evening page fresh soak matrix survey mutants bench gpu docs words lint format changelog release wheel-test clean distclean

help:
	@echo "make demo    run the example end to end       DEMOARGS='...' is passed on"
	@echo "make serve-demo  the same world over HTTP: a server, a closed loop, a stream"
	@echo "make drive-demo  a page on which you drive through it with the arrow keys"
	@echo "make drive   record drives of a simulator, train a world model on them, judge it (an hour)"
	@echo "make vowels  a model of real recordings, asked over HTTP beside two baselines"
	@echo "make robot   train a robot, serve it, and let openpi's client drive it (five minutes)"
	@echo "make test    run the tests                    TESTARGS='-m \"not engine\"' is passed to pytest"
	@echo "             in TEST_JOBS=3 processes; make test-thorough draws ten times the examples"
	@echo "make test-fast  those of them that need no vLLM"
	@echo "make night   run the tests that take minutes each (tests/night)"
	@echo "make openpi  only the environment of openpi's client, which make night and make evening need"
	@echo "make sglang  an environment with SGLang, for its tests of make night (3 GB)"
	@echo "make evening those of them that continuous integration runs"
	@echo "make page    the test of Terra's page in a browser, which needs chromium, chromedriver and nginx"
	@echo "make fresh   make test as on a machine where nothing ever ran; what it leaves behind is a failure"
	@echo "make soak    10,000 malformed requests against one server with good clients   SOAKARGS is passed on"
	@echo "make matrix  the specs on other vLLM versions   VERSIONS='0.28.0 0.16.0' chooses, MATRIXARGS is passed on"
	@echo "make survey  the laws on vLLM's own processors  SURVEYARGS is passed on"
	@echo "make mutants  change mmkit line by line, and see which changes no test finds   MUTANTARGS is passed on"
	@echo "make bench   every benchmark, with its table    BENCHARGS='overhead startup' chooses"
	@echo "make gpu     what only a GPU tells, in ten minutes; without a GPU, the same parts in small sizes"
	@echo "make docs    build the documentation into site/; a warning is an error"
	@echo "make words   count the words of the pages"
	@echo "make lint    ruff, mypy --strict, import-linter"
	@echo "make format  let ruff fix and format the sources"
	@echo "make wheel-test  the wheel in an empty environment: new package, server, examples   WHEELARGS is passed on"
	@echo "make changelog  move the fragments of changelog.d/ into CHANGELOG.md"
	@echo "make release build and check what is released; uploads nothing (CONTRIBUTING.md)"
	@echo "make venv    only create the environment      PYTHON=python3.12 chooses the interpreter"
	@echo "make clean   remove caches and outputs; make distclean removes $(VENV) as well"

# vLLM leaves the sockets of its engines behind, torch headers that it compiled.
IN_OWN_FOLDER := @folder=$$(mktemp -d); trap 'rm -rf $$folder' EXIT; TMPDIR=$$folder

demo: $(VENV)/.installed
	$(IN_OWN_FOLDER) $(BIN)/python -m examples.terra $(DEMOARGS)

serve-demo: $(VENV)/.installed
	$(IN_OWN_FOLDER) $(BIN)/python -m examples.terra.serve_demo $(DEMOARGS)

# Records drives, trains a world model on them, and judges it.
drive: $(VENV)/.installed
	$(BIN)/python -m examples.terra.drive.train --threads $(JOBS)
	$(BIN)/python -m examples.terra.drive.judge --threads $(JOBS)

drive-demo: $(VENV)/.installed
	$(IN_OWN_FOLDER) $(BIN)/python -m examples.terra.page $(DEMOARGS)

vowels: $(VENV)/.installed
	$(IN_OWN_FOLDER) $(BIN)/python -m examples.vowels --out out/vowels

robot: $(VENV)/.installed $(VENV)/openpi/.installed
	$(IN_OWN_FOLDER) $(BIN)/python -m examples.reacher --out out/robot

# Tests of one file, or of one folder of tests/engine, stay in one process: see tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadscope --no-loadscope-reorder

test-fast: $(VENV)/.installed
	$(PYTEST) -n $(JOBS) tests/unit $(TESTARGS)

# The page in a browser wants a machine to itself: `make page`.
PAGE := tests/engine/terra_server/test_page.py

test: $(VENV)/.installed
	$(PYTEST) --ignore $(PAGE) $(TESTARGS)

page: $(VENV)/.installed
	$(BIN)/python -m pytest $(PAGE)

test-thorough: $(VENV)/.installed $(VENV)/.night $(VENV)/openpi/.installed
	HYPOTHESIS_PROFILE=thorough $(PYTEST) --timeout 7200 tests $(TESTARGS)

NIGHT ?= tests/night

night: $(VENV)/.installed $(VENV)/.night $(VENV)/openpi/.installed
	$(PYTEST) --timeout 1200 $(NIGHT) $(TESTARGS)

# The night's tests but for those that take more than all others together, or a quiet machine.
LONG_TESTS := benchmarks commands files pixels ray reacher reacher_dream several_servers sglang silence soak terra \
	vla weight_names weights wild words
LONG := $(patsubst %,--ignore tests/night/test_%.py,$(LONG_TESTS))

evening: $(VENV)/.installed $(VENV)/.night $(VENV)/openpi/.installed
	$(PYTEST) --timeout 1200 tests/night $(LONG) $(TESTARGS)

fresh:
	tools/fresh.sh $(MAKE) test

soak: $(VENV)/.installed $(VENV)/.night
	MMKIT_SOAK=10000 $(PYTEST) -s tests/night/test_soak.py $(SOAKARGS)

matrix: $(VENV)/.installed
	$(BIN)/python -m tools.matrix $(VERSIONS) --jobs $(JOBS) $(MATRIXARGS)

survey: $(VENV)/.installed
	$(BIN)/python -m tools.survey $(SURVEYARGS)

mutants: $(VENV)/.installed $(VENV)/.night
	$(BIN)/python -m tools.mutants --jobs $(JOBS) --store out/mutants.json $(MUTANTARGS)

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks $(BENCHARGS)

# On a machine without a network, put an environment with vLLM's build for CUDA into VENV first.
gpu: $(VENV)/.installed
	$(IN_OWN_FOLDER) $(BIN)/python -m benchmarks.gpu $(BENCHARGS)

# The variable silences what the theme says about its own future.
docs: export NO_MKDOCS_2_WARNING ?= 1
docs: $(VENV)/.installed
	$(BIN)/python -m mkdocs build --strict --clean

words:
	$(PYTHON) -m tools.words

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.names
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Moves the fragments of changelog.d/ into CHANGELOG.md, under the version of mmkit/__init__.py.
changelog: $(VENV)/.installed
	$(BIN)/towncrier build --yes --version "$$($(BIN)/python -m hatchling version)"

release: $(VENV)/.installed $(VENV)/.release
	$(BIN)/python -m tools.release

wheel-test: $(VENV)/.installed
	$(BIN)/python -m tools.wheel_test $(WHEELARGS)

venv: $(VENV)/.installed

# Two steps, so that a change of a pyproject.toml costs seconds. install.py leaves its stamp when
# all is installed; without it, the next run goes on where the last one broke off.

$(VENV)/.requirements: requirements/cpu.txt $(wildcard requirements/*.py)
	@$(PYTHON) requirements/install.py $(VENV)

$(VENV)/.night $(VENV)/.release: $(VENV)/.%: requirements/%.txt $(VENV)/.requirements
	$(PIP) install --quiet --no-deps -r $<
	@touch $@

# openpi's client needs an older numpy than vLLM: it has an environment of its own.
openpi: $(VENV)/openpi/.installed

$(VENV)/openpi/.installed: requirements/openpi.txt $(VENV)/.requirements
	$(BIN)/python -m venv --clear $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	@touch $@

# SGLang pins other versions than vLLM. On a CPU it lacks its kernels: see tools/fix_sglang_environment.py.
# torch brings its libraries where pip sees only the build for CUDA; of the others the list is complete.
sglang: $(VENV)/sglang/.installed

$(VENV)/sglang/.requirements: requirements/sglang.txt tools/fix_sglang_environment.py
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet $$(grep ^torch== $<)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	PYTHONPATH=requirements $(@D)/bin/python tools/fix_sglang_environment.py
	@touch $@

$(VENV)/sglang/.installed: $(VENV)/sglang/.requirements pyproject.toml
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.installed: $(VENV)/.requirements pyproject.toml examples/pyproject.toml
	@rm -f $@
	@$(PIP) uninstall -qq --yes mmkit mmkit-examples  # their names before 0.2
	$(PIP) install --quiet --no-deps --no-build-isolation -e . -e examples
	@touch $@

clean:
	rm -rf out site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
